"""The experts' kernels against the torch reference: interpreted on a CPU, compiled where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.moe import moe_experts_reference, moe_experts_triton, weighted_sum
from kernels.moe_products import product, sort_by_expert
from kernels.moe_strips import experts_by_strips
from kernels.tiles import MOST_STRIP_PAIRS, ExpertsPlan, Strips, StripStep, Tiles, TileStep, default_plan

pytest.importorskip("triton", reason="Triton is not installed on this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

HIDDEN, INNER, EXPERTS, TOPK = 40, 24, 11, 3
STRIPS = ExpertsPlan((StripStep(None, Strips(4, 4), Strips(2, 4)),))
SMALL = Tiles(rows=16, columns=16, depth=16, warps=4, stages=2, group=1, programs=1)
UNEVEN = Tiles(rows=16, columns=32, depth=32, warps=4, stages=2, group=3, programs=2, ahead=True)
TALL = Tiles(rows=128, columns=32, depth=64, warps=4, stages=2, group=2, programs=1)
TILES = ExpertsPlan((TileStep(None, SMALL, UNEVEN),))
ROUTINGS = ("random", "one expert", "first and last")


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def arguments(
    tokens: int, routing: str = "random", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gate_up, down = torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 6, torch.randn(EXPERTS, HIDDEN, INNER) / 5
    ids = {
        "random": torch.rand(tokens, EXPERTS).topk(TOPK).indices,
        "one expert": torch.full((tokens, TOPK), 4),
        "first and last": torch.tensor([EXPERTS - 1, 0, EXPERTS - 1]).repeat(tokens, 1),
    }[routing]
    return torch.randn(tokens, HIDDEN).to(dtype), gate_up.to(dtype), down.to(dtype), ids, torch.rand(tokens, TOPK)


def check(case: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], plan: ExpertsPlan, tolerance: float = 1e-5) -> None:
    actual, expected = moe_experts_triton(*case, plan), moe_experts_reference(*case)
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_strips(tokens: int, routing: str) -> None:
    check(arguments(tokens, routing), STRIPS)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 100])
def test_tiles(tokens: int, routing: str) -> None:
    """Widths that no tile divides, row blocks partly empty, empty experts, programs with several tiles."""
    check(arguments(tokens, routing), TILES)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_tiles_of_many_tokens(routing: str) -> None:
    check(arguments(650, routing), ExpertsPlan((TileStep(None, TALL, TALL),)))


@pytest.mark.parametrize("plan", [STRIPS, TILES])
def test_half_precision_rounds_where_the_reference_does(plan: ExpertsPlan) -> None:
    check(arguments(4, dtype=torch.float16), plan, tolerance=4e-3)


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_default_plan(tokens: int) -> None:
    check(arguments(tokens), default_plan(torch.float32))


def test_no_token() -> None:
    assert moe_experts_triton(*arguments(0), TILES).shape == (0, HIDDEN)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's products depend on a row's place")
def test_the_same_plan_gives_a_token_the_same_bits_in_any_batch() -> None:
    hidden, gate_up, down, ids, weights = arguments(40)
    together = moe_experts_triton(hidden, gate_up, down, ids, weights, TILES)
    alone = moe_experts_triton(hidden[33:34], gate_up, down, ids[33:34], weights[33:34], TILES)
    assert torch.equal(together[33:34], alone)


@pytest.mark.parametrize("pairs", [(1, 1), (50, 3), (3000, 3)])
def test_pairs_are_sorted_by_expert_and_keep_their_order(pairs: tuple[int, int]) -> None:
    ids = torch.randint(0, EXPERTS, pairs)
    order, starts = sort_by_expert(ids, EXPERTS)
    assert torch.equal(order.long(), ids.flatten().argsort(stable=True))
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    assert starts.tolist() == [0, *counts.cumsum(0).tolist()]


def test_rows_beyond_32_bit_offsets() -> None:
    """The last row of x starts 2^31 numbers from the first; pages that nobody touches take no memory."""
    width, rows = 4096, (1 << 19) + 2
    x = torch.empty(rows, width, dtype=torch.float16)
    x[-1] = torch.randn(width)
    weight = torch.randn(1, 16, width).to(torch.float16)
    order = torch.zeros(rows, dtype=torch.int32)
    starts = torch.tensor([rows - 1, rows], dtype=torch.int32)
    tiles = Tiles(rows=16, columns=16, depth=1024, warps=4, stages=1, group=1, programs=1)
    y = product(x, weight, order, starts, 1, tiles, gated=False)
    torch.testing.assert_close(y[0].float(), weight[0].float() @ x[-1].float(), atol=0.2, rtol=1e-2)


def test_weighted_sum() -> None:
    tokens, topk, width = 5, 3, 1100
    outputs, weights = torch.randn(tokens * topk, width), torch.rand(tokens, topk)
    expected = (outputs.view(tokens, topk, width) * weights[..., None]).sum(1)
    torch.testing.assert_close(weighted_sum(outputs, weights), expected, atol=1e-5, rtol=1e-5)


def test_what_the_kernels_cannot_serve_is_named() -> None:
    hidden, gate_up, down, ids, weights = arguments(2)
    with pytest.raises(ValueError, match="down must be contiguous"):
        moe_experts_triton(hidden, gate_up, down.transpose(1, 2), ids, weights, TILES)
    with pytest.raises(ValueError, match=r"gate_up must be contiguous float16"):
        moe_experts_triton(hidden.half(), gate_up, down, ids, weights, TILES)
    with pytest.raises(ValueError, match=r"expert_ids must be .*int64"):
        moe_experts_triton(hidden, gate_up, down, ids.int(), weights, TILES)
    tokens = MOST_STRIP_PAIRS // TOPK + 1
    with pytest.raises(ValueError, match=f"up to {MOST_STRIP_PAIRS} pairs"):
        step = STRIPS.steps[0]
        assert isinstance(step, StripStep)
        experts_by_strips(*arguments(tokens), step)
