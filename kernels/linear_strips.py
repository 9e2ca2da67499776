"""A matrix times a handful of rows: every program holds a strip of the weights in registers.

    y[t] = weight x[t]

x [..., in] of up to MOST_ROWS rows, weight [out, in], no bias; y [..., out] in x's dtype, summed in float32.
Cost: the weights read once: bound by bandwidth. A program asks for all of its strip before it waits for x, so that
weights are on their way while the kernel before still runs; a library's product would not start before that one ends,
nor let the next one start early.
"""

import torch
from torch import Tensor

from kernels.expect import FLOATS, expect, expect_rows
from kernels.lang import pdl, tl, triton

MOST_ROWS = 4
WIDEST = 16384
"""Numbers of a row that a program's registers hold."""
_STRIP = 8192
"""Weights of a program, if a row is not longer: 32 to 64 registers a thread."""
_WARPS = 8


def linear_strips(x: Tensor, weight: Tensor) -> Tensor:
    """[..., out]. Raises ValueError for more rows than MOST_ROWS, or longer ones than WIDEST."""
    rows = x.reshape(-1, x.shape[-1])
    (tokens, inner), outer = rows.shape, len(weight)
    expect_rows("x", rows, (tokens, inner), *FLOATS)
    expect("weight", weight, (outer, inner), x.dtype)
    if tokens > MOST_ROWS or inner > WIDEST:
        raise ValueError(f"strips serve {MOST_ROWS} rows of up to {WIDEST} numbers, got {tokens} of {inner}")
    y = torch.empty(*x.shape[:-1], outer, dtype=x.dtype, device=x.device)
    depth = triton.next_power_of_2(inner)
    columns = max(1, _STRIP // depth)
    _linear_strips[(triton.cdiv(outer, columns),)](
        rows,
        weight,
        y,
        tokens,
        inner,
        outer,
        rows.stride(0),
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=_WARPS,
        **pdl(x),
    )
    return y


@triton.jit
def _linear_strips(
    x, weight, y, tokens, inner, outer, x_stride, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr
):
    """y[:, columns] of one strip."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    within = depth < inner
    matrix = weight + tl.minimum(column, outer - 1).to(tl.int64)[:, None] * inner + depth[None, :]
    strip = tl.load(matrix, mask=within[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for token in range(tokens):
        row = tl.load(x + token * x_stride + depth, mask=within, other=0.0).to(tl.float32)
        total = tl.sum(strip.to(tl.float32) * row[None, :], 1)
        tl.store(y + token * outer + column, total.to(y.dtype.element_ty), mask=column < outer)
