"""A matrix of its own for every head: MLA's absorption of W_UK into the query, and of W_UV onto the output.

    y[t, h] = x[t, h] @ weight[h]

x [T, heads, in], weight [heads, in, out], any strides; y [T, heads, out].
Cost: the weights read once, 2 MiB a layer at small's size; bound by bandwidth for the few rows of decode.

For few rows a program takes all of the inner dimension and a narrow strip of the outer one, so that many programs
share the weights, and each asks for its own before it waits for x.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_invariant import padded_rows
from kernels.lang import pdl, tl, triton, use_triton

_FEW_TOKENS = 32
_MOST_WHOLE = 512
"""Widest inner dimension that a program takes whole."""
_STRIP = 8192
"""Weights of a program that takes the inner dimension whole: 128 such programs a layer of small."""


def head_linear(x: Tensor, weight: Tensor, *, batch_invariant: bool = False) -> Tensor:
    """[T, heads, out] in x's dtype; shapes as in this file's head.

    `batch_invariant` makes the Triton form compute a row alike in any batch; the other always does on a CPU.
    """
    if use_triton(x):
        return head_linear_triton(x, weight, batch_invariant=batch_invariant)
    return head_linear_reference(x, weight)


def head_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """On a CPU with enough rows for a token to give the same bits in any batch (kernels/batch_invariant.py)."""
    padding = padded_rows(len(x)) - len(x) if x.device.type == "cpu" else 0
    return torch.einsum("thi,hio->tho", F.pad(x, (0, 0, 0, 0, 0, padding)), weight)[: len(x)]


def head_linear_triton(x: Tensor, weight: Tensor, *, batch_invariant: bool = False) -> Tensor:
    (tokens, heads, inner), outer = x.shape, weight.shape[2]
    if weight.shape != (heads, inner, outer) or weight.dtype != x.dtype:
        raise ValueError(f"x {x.dtype} {list(x.shape)} does not go with weight {weight.dtype} {list(weight.shape)}")
    y = torch.empty(tokens, heads, outer, dtype=x.dtype, device=x.device)
    few = tokens <= _FEW_TOKENS and not batch_invariant
    whole = few and inner <= _MOST_WHOLE
    rows = 64 if not few else 32 if tokens > 16 else 16
    depth = min(_MOST_WHOLE if whole else 128, max(16, triton.next_power_of_2(inner)))
    columns = min(_STRIP // depth if whole else 128, max(16, triton.next_power_of_2(outer)))
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
        DEPTH=depth,
        WHOLE=whole,
        **pdl(x),
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
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(2)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    source = x + row[:, None] * x_token + head * x_head + depth[None, :] * x_inner
    matrix = weight + head * w_head + depth[:, None] * w_inner + column[None, :] * w_outer
    wanted, present = (column < outer)[None, :], (row < tokens)[:, None]
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if WHOLE:
        b = tl.load(matrix, mask=(depth < inner)[:, None] & wanted, other=0.0)
        if PDL:
            tl.extra.cuda.gdc_wait()
        a = tl.load(source, mask=present & (depth < inner)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        for start in range(0, inner, DEPTH):
            within = start + depth < inner
            a = tl.load(source + start * x_inner, mask=present & within[None, :], other=0.0)
            b = tl.load(matrix + start * w_inner, mask=within[:, None] & wanted, other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
    target = y + (row[:, None] * tl.num_programs(2) + head) * outer + column[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=present & wanted)
