"""The flat optimizer is torch's AdamW, clipped, and Muon inside layers; its state comes back; the average follows."""

import pytest
import torch
from torch import Tensor, nn

from model.demo.flat import MOMENTUM, MUON_SIZE, FlatParameters, orthogonal

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


class Layered(nn.Module):
    """Matrices of two shapes in layers, one in a stack as experts are, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 9))
        self.layers[1].stack = nn.Parameter(torch.randn(3, 9, 6))
        self.head = nn.Linear(9, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        stack = self.get_parameter("layers.1.stack")
        found: Tensor = self.head(self.layers(inputs))
        return found + torch.einsum("bi,soi->b", inputs, stack.tanh())[:, None]


def test_orthogonal_keeps_directions_and_evens_sizes() -> None:
    """Against the singular value decomposition, for wide and tall matrices."""
    torch.manual_seed(1)
    for shape in ((3, 8, 20), (2, 20, 8), (1, 6, 6)):
        matrices = torch.randn(shape, dtype=torch.float64)
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        found = orthogonal(matrices, torch.float64).double()
        inside = left.mT @ found @ right.mT
        sizes = inside.diagonal(dim1=-2, dim2=-1)
        assert float(sizes.min()) > 0.5 and float(sizes.max()) < 1.3
        torch.testing.assert_close(inside, torch.diag_embed(sizes), atol=1e-5, rtol=0)


def test_matrices_in_layers_follow_muon() -> None:
    """Step by step against the formula, matrix by matrix; what lies outside and vectors follow AdamW."""
    torch.manual_seed(2)
    mine, other = Layered(), Layered()
    other.load_state_dict(mine.state_dict())
    flat = FlatParameters({"module": mine}, dtype=torch.float32, decay=DECAY)
    inner = [p for name, p in other.named_parameters() if name.startswith("layers") and p.dim() > 1]
    rest = [{"params": [other.head.weight], "weight_decay": DECAY}]
    rest += [{"params": [p for p in other.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(rest, lr=RATE, betas=BETAS)
    momenta = [torch.zeros_like(p) for p in inner]
    for number in range(1, 6):
        inputs = torch.randn(11, 6, generator=torch.Generator().manual_seed(number))
        for module in (mine, other):
            module.zero_grad(set_to_none=False)
            (module(inputs) - 1).square().mean().backward()
        flat.step(number=number, rate=RATE, betas=BETAS, clip=CLIP, average=0.9)
        nn.utils.clip_grad_norm_(other.parameters(), CLIP)
        adamw.step()
        with torch.no_grad():
            for p, momentum in zip(inner, momenta, strict=True):
                assert p.grad is not None
                momentum.lerp_(p.grad, 1 - MOMENTUM)
                direction = torch.lerp(p.grad, momentum, MOMENTUM).view(-1, *p.shape[-2:])
                update = torch.stack([orthogonal(one[None], torch.float32)[0] for one in direction]).view_as(p)
                p.mul_(1 - RATE * DECAY).sub_(RATE * MUON_SIZE * max(p.shape[-2:]) ** 0.5 * update)
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=2e-5, rtol=1e-4)


def test_without_muon_layers_follow_adamw_too() -> None:
    torch.manual_seed(2)
    mine, other = Layered(), Layered()
    other.load_state_dict(mine.state_dict())
    flat = FlatParameters({"module": mine}, dtype=torch.float32, decay=0.0, muon=False)
    adamw = torch.optim.AdamW(other.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    for number in range(1, 6):
        inputs = torch.randn(11, 6, generator=torch.Generator().manual_seed(number))
        for module in (mine, other):
            module.zero_grad(set_to_none=False)
            (module(inputs) - 1).square().mean().backward()
        flat.step(number=number, rate=RATE, betas=BETAS, clip=CLIP, average=0.9)
        nn.utils.clip_grad_norm_(other.parameters(), CLIP)
        adamw.step()
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
