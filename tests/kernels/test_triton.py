"""The Triton kernels against their torch references: interpreted in float32 on a CPU, compiled where there is a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import silu_mul_reference, silu_mul_triton
from kernels.head_linear import head_linear_reference, head_linear_triton
from kernels.latent_write import write_latents_reference, write_latents_triton
from kernels.linear_strips import linear_strips
from kernels.norm import add_rms_norm_rows_triton, add_rms_norm_triton, rms_norm_reference, rms_norm_triton
from kernels.rope_cache import rope_frequencies, rope_tables_reference, rope_tables_triton
from kernels.router import route, route_triton

pytest.importorskip("triton", reason="Triton is not installed on this platform")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        yield


def assert_near(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tokens", [9, 70])
@pytest.mark.parametrize(("scoring", "biased", "normalize"), [("softmax", False, False), ("sigmoid", True, True)])
def test_router_chooses_and_weighs_as_the_reference(scoring: str, biased: bool, normalize: bool, tokens: int) -> None:
    hidden, weight = torch.randn(tokens, 600), torch.randn(11, 600) / 20
    bias = torch.randn(11) / 3 if biased else None
    settings = {"topk": 3, "scoring": scoring, "normalize": normalize, "scaling_factor": 2.0, "num_shared": 2}
    chosen, weights = route_triton(hidden, weight, bias, **settings)  # type: ignore[arg-type]
    on_cpu = [tensor if tensor is None else tensor.cpu() for tensor in (hidden, weight, bias)]
    method = "noaux_tc" if biased else "greedy"
    expected, expected_weights = route(*on_cpu, method=method, num_groups=1, topk_groups=1, **settings)  # type: ignore[arg-type]
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert torch.equal(chosen.gather(-1, order).cpu(), expected.gather(-1, expected_order))
    assert_near(weights.gather(-1, order).cpu(), expected_weights.gather(-1, expected_order))


def test_gated_activation() -> None:
    x = torch.randn(5, 2 * 1100)
    assert_near(silu_mul_triton(x), silu_mul_reference(x))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter's products depend on a row's place")
def test_batch_invariant_router_computes_a_token_alike_in_any_batch() -> None:
    hidden, weight = torch.randn(70, 64), torch.randn(11, 64)
    settings = {"topk": 3, "scoring": "softmax", "normalize": False, "scaling_factor": 1.0, "batch_invariant": True}
    chosen, weights = route_triton(hidden, weight, None, **settings)  # type: ignore[arg-type]
    alone = [route_triton(row[None], weight, None, **settings) for row in hidden[60:]]  # type: ignore[arg-type]
    assert torch.equal(torch.cat([ids for ids, _ in alone]), chosen[60:])
    assert torch.equal(torch.cat([values for _, values in alone]), weights[60:])


def test_router_takes_the_first_of_equals() -> None:
    settings = {"topk": 3, "scoring": "softmax", "normalize": False, "scaling_factor": 1.0}
    chosen, weights = route_triton(torch.zeros(2, 64), torch.zeros(8, 64), None, **settings)  # type: ignore[arg-type]
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert_near(weights, torch.full((2, 3), 1 / 8))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_router_chooses_experts_that_exist_for_tokens_that_are_no_numbers(scoring: str) -> None:
    """Else one broken token would have every token's kernels read beyond the experts' weights."""
    hidden, weight, bias = torch.full((2, 64), torch.nan), torch.randn(72, 64), torch.zeros(72)
    settings = {"topk": 6, "scoring": scoring, "normalize": True, "scaling_factor": 1.0}
    chosen, weights = route_triton(hidden, weight, bias if scoring == "sigmoid" else None, **settings)  # type: ignore[arg-type]
    assert all(len(set(row)) == 6 and min(row) >= 0 and max(row) < 72 for row in chosen.tolist())
    assert weights.isnan().all()


def test_norms_of_widths_that_are_no_power_of_two() -> None:
    x, residual, weight = torch.randn(5, 100), torch.randn(5, 100), torch.randn(100)
    normed, total = add_rms_norm_triton(x, residual, weight, 1e-6)
    assert_near(total, x + residual)
    assert_near(normed, rms_norm_reference(x + residual, weight, 1e-6))
    rows = torch.tensor([3, 0, 3])
    assert_near(add_rms_norm_rows_triton(x, residual, rows, weight, 1e-6), normed[rows])
    strided = x[:, :50]
    assert_near(rms_norm_triton(strided, weight[:50], 1e-6), rms_norm_reference(strided, weight[:50], 1e-6))


@pytest.mark.parametrize("tokens", [1, 7, 20, 70])
def test_head_linear_of_strided_inputs_and_transposed_weights(tokens: int) -> None:
    weight = torch.randn(5, 32 + 40, 64)
    x = torch.randn(tokens, 5, 48)[..., :32]
    assert_near(head_linear_triton(x, weight[:, :32]), head_linear_reference(x, weight[:, :32]))
    y, transposed = torch.randn(tokens, 5, 64), weight[:, 32:].transpose(1, 2)
    assert_near(head_linear_triton(y, transposed), head_linear_reference(y, transposed))
    z, deep = torch.randn(tokens, 2, 600), torch.randn(2, 600, 24) / 20
    assert_near(head_linear_triton(z, deep), head_linear_reference(z, deep))


@pytest.mark.parametrize("tokens", [0, 1, 2, 4])
def test_linear_of_few_strided_rows(tokens: int) -> None:
    for inner, outer in ((48, 37), (3000, 5)):  # a strip's columns and depth are partly unused
        x, weight = torch.randn(tokens, 2 * inner)[:, :inner], torch.randn(outer, inner) / inner**0.5
        assert_near(linear_strips(x, weight), F.linear(x, weight))


def test_cos_and_sin_of_far_positions() -> None:
    positions, frequencies = torch.tensor([0, 1, 63, 4095, 163839]), rope_frequencies(24, 10000.0, torch.device(DEVICE))
    for actual, expected in zip(
        rope_tables_triton(positions, frequencies), rope_tables_reference(positions, frequencies), strict=True
    ):
        assert_near(actual, expected)


def test_latents_are_normed_rotated_and_written() -> None:
    tokens, heads, nope, rope, rank = 9, 5, 32, 16, 64
    projected = torch.randn(tokens, heads * (nope + rope) + rank + rope)
    weight, rotary = torch.randn(rank), (torch.randn(tokens, rope // 2), torch.randn(tokens, rope // 2))
    slots = torch.randperm(192)[:tokens]
    results = []
    for write in (write_latents_triton, write_latents_reference):
        rows, kv_cache = projected.clone(), torch.zeros(3, 64, rank + rope)
        query = rows[:, : heads * (nope + rope)].unflatten(-1, (heads, nope + rope))
        write(query, rows[:, heads * (nope + rope) :], weight, rotary, kv_cache, slots, rope=rope, eps=1e-6)
        results.append((rows, kv_cache))
    (rows, kv_cache), (expected_rows, expected_cache) = results
    assert_near(rows, expected_rows)
    assert_near(kv_cache, expected_cache)
