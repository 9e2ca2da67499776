"""A matrix of its own for every head: MLA's absorption of W_UK into the query, and of W_UV onto the output.

    y[t, h] = x[t, h] @ weight[h]

x [T, heads, in], weight [heads, in, out], any strides; y [T, heads, out].
Cost: the weights read once, 2 MiB a layer at small's size; bound by bandwidth for the few rows of decode.
"""

import torch
from torch import Tensor

from kernels.lang import tl, triton, use_triton


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """[T, heads, out] in x's dtype; shapes as in this file's head."""
    return (head_linear_triton if use_triton(x) else head_linear_reference)(x, weight)


def head_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("thi,hio->tho", x, weight)


def head_linear_triton(x: Tensor, weight: Tensor) -> Tensor:
    (tokens, heads, inner), outer = x.shape, weight.shape[2]
    y = torch.empty(tokens, heads, outer, dtype=x.dtype, device=x.device)
    rows = 16 if tokens <= 32 else 64
    columns = min(128, max(16, triton.next_power_of_2(outer)))
    grid = (triton.cdiv(tokens, rows), triton.cdiv(outer, columns), heads)
    _head_linear[grid](
        x,
        weight,
        y,
        tokens,
        inner,
        outer,
        *x.stride(),
        *weight.stride(),
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=min(128, max(16, triton.next_power_of_2(inner))),
        num_warps=4,
        num_stages=3,
    )
    return y


@triton.jit
def _head_linear(
    x,
    weight,
    y,
    tokens,
    inner,
    outer,
    x_token,
    x_head,
    x_inner,
    w_head,
    w_inner,
    w_outer,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    head = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inner, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        within = depth < inner
        a = tl.load(
            x + row[:, None] * x_token + head * x_head + depth[None, :] * x_inner,
            mask=(row < tokens)[:, None] & within[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + head * w_head + depth[:, None] * w_inner + column[None, :] * w_outer,
            mask=within[:, None] & (column < outer)[None, :],
            other=0.0,
        )
        acc += tl.dot(a, b, input_precision="ieee")
    target = y + (row[:, None] * tl.num_programs(2) + head) * outer + column[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=(row < tokens)[:, None] & (column < outer)[None, :])
