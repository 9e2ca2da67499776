"""A linear layer whose rows do not know of each other: y[t] = weight x[t] + bias, the same bits in any batch.

x [..., in], weight [out, in], bias [out] or None; y [..., out] in x's dtype. Cost: 2 * T * in * out operations, the
weights read once: bound by bandwidth for the few rows of decode, by arithmetic for many.

A library's product chooses its algorithm by the number of rows, so that a row's last bits change with what else is
in the batch. Two remedies, by device:

- CPU: the product's inner loop adds a row's terms in the same order whatever the row's place, as long as there are
  enough rows for the blocked form (fewer, up to 3 or up to 15 by the processor, go another way, and rows are dealt to
  threads). So few rows are padded up to `_CPU_ROWS`, or more with many threads. The tests hold this to the bit at the
  demo model's widths; the library promises nothing, and at some others (896, tiny's experts) several threads do differ.
- CUDA: one Triton kernel with one tile shape for all sizes. It is slower than the library, so it runs only where
  `batch_invariant` asks for it. Elsewhere a handful of rows goes through kernels/linear_strips.py, more through the
  library.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.expect import FLOATS, expect, expect_rows
from kernels.lang import tl, triton, use_triton
from kernels.linear_strips import MOST_ROWS, WIDEST, linear_strips

_CPU_ROWS = 16
_CPU_ROWS_A_THREAD = 8
_VECTOR = 32  # float32 numbers that the widest vector loops take at once
_ONE_THREAD = 32768  # numbers that torch does not divide among threads

_TILE = 64


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Tensor:
    """[..., out]; shapes as in this file's head. `batch_invariant` matters on CUDA only: a CPU always is.

    Raises ValueError where a batch-invariant product is asked of a device that has none.
    """
    if x.device.type == "cpu":
        return linear_padded(x, weight, bias)
    if not batch_invariant:
        few = bias is None and x.numel() <= MOST_ROWS * x.shape[-1] and x.shape[-1] <= WIDEST
        return linear_strips(x, weight) if few and use_triton(x) else F.linear(x, weight, bias)
    if not use_triton(x):
        raise ValueError(f"a batch-invariant product on {x.device.type} needs Triton")
    return linear_triton(x, weight, bias)


def linear_padded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    padding = padded_rows(len(rows)) - len(rows)
    if not padding:
        return F.linear(x, weight, bias)
    y = F.linear(F.pad(rows, (0, 0, 0, padding)), weight, bias)
    return y[: len(rows)].view(*x.shape[:-1], len(weight))


def padded_rows(rows: int) -> int:
    """Rows, at least one, that a product on a CPU is to have so that each comes out as in any other batch."""
    return max(rows, _CPU_ROWS, _CPU_ROWS_A_THREAD * torch.get_num_threads())


def whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function of x [..., width], the same bits for a row in any batch.

    A CPU computes whole vectors in one way and what is left over in another. So that it is not the batch which decides
    where something is left over, rows are widened to whole vectors, and so few are taken together that one thread
    does them.
    """
    if x.device.type != "cpu":
        return function(x)
    rows = F.pad(x, (0, -x.shape[-1] % _VECTOR)).flatten(0, -2)
    parts = rows.split(max(1, _ONE_THREAD // rows.shape[-1]))
    return torch.cat([function(part) for part in parts])[:, : x.shape[-1]].reshape(x.shape)


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """`out`: contiguous [..., out] of any float dtype that takes the result."""
    rows = x.reshape(-1, x.shape[-1])
    (tokens, inner), outer = rows.shape, len(weight)
    expect_rows("x", rows, (tokens, inner), *FLOATS)
    expect_rows("weight", weight, (outer, inner), x.dtype)
    if bias is not None:
        expect("bias", bias, (outer,), *FLOATS)
    if out is not None:
        expect("out", out, (*x.shape[:-1], outer), *FLOATS)
    y = torch.empty(*x.shape[:-1], outer, dtype=x.dtype, device=x.device) if out is None else out
    _linear[(triton.cdiv(tokens, _TILE), triton.cdiv(outer, _TILE))](
        rows,
        weight,
        weight if bias is None else bias,
        y,
        tokens,
        inner,
        outer,
        rows.stride(0),
        weight.stride(0),
        BIAS=bias is not None,
        TILE=_TILE,
        num_warps=4,
        num_stages=4,
    )
    return y


@triton.jit
def _linear(x, weight, bias, y, tokens, inner, outer, x_stride, weight_stride, BIAS: tl.constexpr, TILE: tl.constexpr):
    """One TILE x TILE part of y, its terms added in the order of `inner`."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    present, wanted = row < tokens, column < outer
    acc = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, inner, TILE):
        depth = start + tl.arange(0, TILE)
        within = depth < inner
        a = tl.load(x + row[:, None] * x_stride + depth[None, :], mask=present[:, None] & within[None, :], other=0.0)
        b = tl.load(
            weight + column[None, :] * weight_stride + depth[:, None],
            mask=within[:, None] & wanted[None, :],
            other=0.0,
        )
        acc += tl.dot(a, b, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * outer + column[None, :], acc.to(y.dtype.element_ty), mask=present[:, None] & wanted)
