"""Cases of what a decoder layer does besides attention: norms, router, experts, dense MLP; and of the output matrix."""

from collections.abc import Iterator
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import silu_mul
from kernels.batch_invariant import linear
from kernels.bench.measure import Case, Work, copies, relative_error
from kernels.bench.setups import Setup
from kernels.linear import float32_linear
from kernels.linear_strips import MOST_ROWS
from kernels.moe import moe_experts, moe_experts_reference
from kernels.norm import add_rms_norm, add_rms_norm_rows, rms_norm
from kernels.router import route
from kernels.tiles import plan_for


def cases(setup: Setup) -> Iterator[Case]:
    sizes = setup.sizes
    for rows in sizes.rows:
        yield Case("rms_norm", f"{rows} rows", partial(norm, setup, rows), setup.tolerance)
        yield Case("add_rms_norm", f"{rows} rows", partial(add_norm, setup, rows), setup.tolerance)
        yield Case("add_rms_norm_rows", f"{rows} rows, half of them", partial(norm_rows, setup, rows), setup.tolerance)
        yield Case("silu_mul", f"{rows} rows of the dense MLP", partial(gated, setup, rows), setup.tolerance)
    for tokens in sizes.routed:
        yield Case("router", f"{tokens} tokens", partial(router, setup, tokens), 1e-4)
        yield Case("experts", f"{tokens} tokens", partial(routed, setup, tokens), setup.tolerance)
    for rows in (1, MOST_ROWS):
        yield Case("linear, strips", f"{rows} rows", partial(strips, setup, rows), setup.tolerance)
    for rows in sizes.absorbed:
        yield Case("output matrix", f"{rows} rows, float32", partial(output, setup, rows), setup.tolerance)
        yield Case("linear, invariant", f"{rows} rows", partial(invariant, setup, rows), setup.tolerance)


def norm(setup: Setup, rows: int) -> Work:
    x, weight = setup.random(rows, setup.geometry.hidden), setup.random(setup.geometry.hidden)
    call = partial(rms_norm, x, weight, 1e-6)
    return Work([call], lambda: relative_error(call(), _normed(x.double(), weight)), 2 * x.nbytes)


def add_norm(setup: Setup, rows: int) -> Work:
    x, residual = setup.random(2, rows, setup.geometry.hidden)
    weight = setup.random(setup.geometry.hidden)
    call = partial(add_rms_norm, x, residual, weight, 1e-6)

    def error() -> float:
        normed, total = call()
        expected = x.double() + residual.double()
        return max(relative_error(total, expected), relative_error(normed, _normed(expected, weight)))

    return Work([call], error, 4 * x.nbytes)


def norm_rows(setup: Setup, rows: int) -> Work:
    x, residual = setup.random(2, rows, setup.geometry.hidden)
    weight = setup.random(setup.geometry.hidden)
    chosen = torch.randperm(rows)[: -(-rows // 2)]
    call = partial(add_rms_norm_rows, x, residual, chosen, weight, 1e-6)
    expected = _normed((x.double() + residual.double())[chosen], weight)
    moved = 3 * len(chosen) * setup.geometry.hidden * setup.dtype.itemsize
    return Work([call], lambda: relative_error(call(), expected), moved)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight.double()


def gated(setup: Setup, rows: int) -> Work:
    x = setup.random(rows, 2 * setup.geometry.dense)
    call = partial(silu_mul, x)

    def error() -> float:
        some = setup.compared(rows)
        gate, up = x[some].double().chunk(2, dim=-1)
        return relative_error(call()[some], F.silu(gate) * up)

    return Work([call], error, x.nbytes * 3 // 2)


def router(setup: Setup, tokens: int) -> Work:
    geometry = setup.geometry
    weights = [torch.randn(geometry.experts, geometry.hidden) / geometry.hidden**0.5 for _ in range(16)]
    bias = torch.randn(geometry.experts) / 3 if geometry.sigmoid else None
    x = setup.random(tokens, geometry.hidden)
    calls = [
        partial(
            route,
            x,
            weight,
            bias,
            topk=geometry.topk,
            method="noaux_tc" if geometry.sigmoid else "greedy",
            scoring="sigmoid" if geometry.sigmoid else "softmax",
            normalize=geometry.sigmoid,
            scaling_factor=2.0 if geometry.sigmoid else 1.0,
            num_groups=1,
            topk_groups=1,
            num_shared=geometry.shared,
        )
        for weight in weights
    ]

    def error() -> float:
        """Of the weights that the chosen experts get; which they are shows where equals change places, too."""
        chosen, given = calls[0]()
        logits = x.double() @ weights[0].double().t()
        scores = logits.sigmoid() if geometry.sigmoid else logits.softmax(-1)
        best = (scores if bias is None else scores + bias).topk(geometry.topk).indices
        expected = scores.gather(-1, best)
        if geometry.sigmoid:
            expected = 2.0 * expected / expected.sum(-1, keepdim=True)
        always = torch.arange(geometry.experts, geometry.experts + geometry.shared)
        if not torch.equal(chosen[:, geometry.topk :], always.expand(tokens, -1)):
            return float("inf")
        return relative_error(given[:, : geometry.topk].sort(-1).values, expected.sort(-1).values)

    return Work(calls, error, weights[0].nbytes + x.nbytes + tokens * (geometry.topk + geometry.shared) * 12)


@lru_cache(maxsize=1)
def _experts(setup: Setup) -> list[tuple[Tensor, Tensor]]:
    """The weights of some layers' experts, made once for all cases."""
    geometry = setup.geometry
    count, layers = geometry.experts + geometry.shared, 1 if setup.sizes.whole else 3
    return [
        (
            setup.random(count, 2 * geometry.inner, geometry.hidden, std=0.02),
            setup.random(count, geometry.hidden, geometry.inner, std=0.02),
        )
        for _ in range(layers)
    ]


def routed(setup: Setup, tokens: int) -> Work:
    """Experts drawn evenly. Cost: those that any token chose, and the tokens' rows in and out."""
    geometry, layers = setup.geometry, _experts(setup)
    plan = plan_for(layers[0][0])
    x = setup.random(tokens, geometry.hidden)
    ids = torch.rand(tokens, geometry.experts).topk(geometry.topk).indices
    always = torch.arange(geometry.experts, geometry.experts + geometry.shared)
    ids = torch.cat((ids, always.expand(tokens, -1)), dim=-1)
    weights = torch.rand(tokens, geometry.topk + geometry.shared)
    calls = [partial(moe_experts, x, *layer, ids, weights, plan) for layer in layers]

    def error() -> float:
        """Of a few tokens, whose experts alone are widened to float64."""
        some = torch.linspace(0, tokens - 1, min(tokens, 5)).long()
        used, places = ids[some].unique(return_inverse=True)
        gate_up, down = (matrix[used].double() for matrix in layers[0])
        expected = moe_experts_reference(x[some].double(), gate_up, down, places, weights[some].double())
        return relative_error(calls[0]()[some], expected)

    pairs = tokens * (geometry.topk + geometry.shared)
    expert_bytes = 3 * geometry.hidden * geometry.inner * setup.dtype.itemsize
    operations = 6.0 * pairs * geometry.hidden * geometry.inner
    return Work(calls, error, len(ids.unique()) * expert_bytes + 2 * x.nbytes, operations)


def output(setup: Setup, rows: int) -> Work:
    """Logits: in 16 bits times 16 bits, summed and kept in float32."""
    geometry = setup.geometry
    x, weight = setup.random(rows, geometry.hidden), setup.random(geometry.vocab, geometry.hidden, std=0.02)
    call = partial(float32_linear, x, weight)

    def error() -> float:
        some = torch.arange(0, geometry.vocab, max(1, geometry.vocab // 512))
        return relative_error(call()[:, some], x.double() @ weight[some].double().t())

    moved = x.nbytes + weight.nbytes + 4 * rows * geometry.vocab
    return Work([call], error, moved, 2.0 * rows * weight.numel())


def strips(setup: Setup, rows: int) -> Work:
    """The product of a few rows, square."""
    return _square(setup, rows, None, batch_invariant=False)


def invariant(setup: Setup, rows: int) -> Work:
    """The product of `--deterministic`, square."""
    return _square(setup, rows, setup.random(setup.geometry.hidden), batch_invariant=True)


def _square(setup: Setup, rows: int, bias: Tensor | None, *, batch_invariant: bool) -> Work:
    hidden = setup.geometry.hidden
    x = setup.random(rows, hidden)
    weights = [setup.random(hidden, hidden, std=0.02) for _ in range(copies(hidden**2 * setup.dtype.itemsize))]
    calls = [partial(linear, x, weight, bias, batch_invariant=batch_invariant) for weight in weights]

    def error() -> float:
        expected = F.linear(x.double(), weights[0].double(), None if bias is None else bias.double())
        return relative_error(calls[0](), expected)

    return Work(calls, error, 2 * x.nbytes + weights[0].nbytes, 2.0 * rows * hidden**2)
