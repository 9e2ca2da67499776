"""The flat optimizer is torch's AdamW, clipped; its state comes back; the average follows."""

import pytest
import torch
from torch import Tensor, nn

from model.demo.flat import FlatParameters

RATE, BETAS, DECAY, CLIP = 0.01, (0.9, 0.97), 0.05, 0.5


def _module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(module: nn.Module, step: int) -> Tensor:
    inputs = torch.randn(11, 5, generator=torch.Generator().manual_seed(step))
    found: Tensor = module(inputs)
    return (found - 1).square().mean() * 3


def _step(flat: FlatParameters, module: nn.Module, number: int) -> Tensor:
    _loss(module, number).backward()
    return flat.step(number=number, rate=RATE, betas=BETAS, clip=CLIP, average=0.9)


def test_equals_torch_adamw() -> None:
    mine, other = _module(), _module()
    flat = FlatParameters({"module": mine}, dtype=torch.float32, decay=DECAY)
    matrices = [p for p in other.parameters() if p.dim() > 1]
    vectors = [p for p in other.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
    for number in range(1, 13):
        norm = _step(flat, mine, number)
        adamw.zero_grad()
        _loss(other, number).backward()
        expected_norm = nn.utils.clip_grad_norm_(other.parameters(), CLIP)
        adamw.step()
        torch.testing.assert_close(norm, expected_norm)
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)


def test_narrow_copy_follows_a_float32_master() -> None:
    """Steps too small for bfloat16 add up in the master copy."""
    module = _module()
    flat = FlatParameters({"module": module}, dtype=torch.bfloat16, decay=0.0)
    before = flat.master.clone()
    for number in range(1, 4):
        inputs = torch.ones(2, 5, dtype=torch.bfloat16)
        module(inputs).float().square().sum().backward()
        flat.step(number=number, rate=1e-5, betas=BETAS, clip=1.0, average=0.9)
    assert next(module.parameters()).dtype == torch.bfloat16
    changed = (flat.master - before).abs()
    assert 0 < float(changed.max()) <= 4e-5
    assert torch.equal(torch.cat([p.flatten() for p in module.parameters()]), flat.master.to(torch.bfloat16))


def test_a_gradient_that_is_not_finite_moves_nothing_far() -> None:
    module = _module()
    flat = FlatParameters({"module": module}, dtype=torch.float32, decay=0.0)
    before = flat.master.clone()
    (_loss(module, 1) * float("inf")).backward()
    norm = flat.step(number=1, rate=RATE, betas=BETAS, clip=CLIP, average=0.9)
    assert not norm.isfinite()
    assert torch.equal(flat.master, before)


def test_state_and_average() -> None:
    module = _module()
    flat = FlatParameters({"module": module}, dtype=torch.float32, decay=DECAY)
    for number in range(1, 4):
        _step(flat, module, number)
    state = {name: value if isinstance(value, list) else value.clone() for name, value in flat.state().items()}
    for number in range(4, 6):
        _step(flat, module, number)
    expected = flat.master.clone()
    again = _module(seed=5)
    other = FlatParameters({"module": again}, dtype=torch.float32, decay=DECAY)
    other.load_state(state)
    for number in range(4, 6):
        _step(other, again, number)
    assert torch.equal(other.master, expected)
    with other.averaged():
        assert torch.equal(torch.cat([p.detach().flatten() for p in again.parameters()]), other.average)
        assert not torch.equal(other.average, expected)
    assert torch.equal(torch.cat([p.detach().flatten() for p in again.parameters()]), expected)
    with pytest.raises(ValueError, match="another model"):
        FlatParameters({"other": _module()}, dtype=torch.float32, decay=DECAY).load_state(state)
