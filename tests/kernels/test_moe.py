"""The experts against a loop over tokens, for every shape of routing."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.moe import moe_experts
from kernels.router import route

EXPERTS, HIDDEN, WIDTH, TOPK = 7, 12, 5, 3


def loop(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for t, x in enumerate(hidden.double()):
        for e, w in zip(expert_ids[t], weights[t], strict=True):
            gate, up = (gate_up[e].double() @ x).chunk(2)
            out[t] += w * (down[e].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 17])
@pytest.mark.parametrize("routing", ["random", "one expert", "few experts"])
def test_experts_equal_a_loop_over_tokens(tokens: int, routing: str) -> None:
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, HIDDEN)
    gate_up, down = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
    weights = torch.rand(tokens, TOPK)
    expert_ids = {
        "random": torch.rand(tokens, EXPERTS).topk(TOPK).indices,
        "one expert": torch.full((tokens, TOPK), 4),
        "few experts": torch.tensor([0, EXPERTS - 1, 2]).expand(tokens, -1),
    }[routing]
    out = moe_experts(hidden, gate_up, down, expert_ids, weights)
    torch.testing.assert_close(out.double(), loop(hidden, gate_up, down, expert_ids, weights), atol=1e-4, rtol=1e-4)


def test_route_refuses_what_it_does_not_know() -> None:
    settings = {"topk": 2, "scoring": "softmax", "normalize": False, "scaling_factor": 1.0}
    groups = {"num_groups": 1, "topk_groups": 1}
    with pytest.raises(ValueError, match="gready"):
        route(torch.zeros(1, 4), torch.zeros(3, 4), None, method="gready", **settings, **groups)
    with pytest.raises(ValueError, match="correction bias"):
        route(torch.zeros(1, 4), torch.zeros(3, 4), None, method="noaux_tc", **settings, **groups)
