"""The gated activation of an MLP, from the joint product of gate and up.

    y[t, i] = silu(x[t, i]) * x[t, I + i],   silu(z) = z / (1 + exp(-z))

x [T, 2I], the gate's half first; y [T, I]. silu is rounded to x's dtype before it is multiplied, as in the reference.
Cost: 3 * T * I values read and written once; bound by bandwidth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_invariant import whole_vectors
from kernels.expect import FLOATS, expect
from kernels.lang import pdl, tl, triton, use_triton


def silu_mul(x: Tensor) -> Tensor:
    """[T, I] in x's dtype; shapes as in this file's head."""
    return (silu_mul_triton if use_triton(x) else silu_mul_reference)(x)


def silu_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return whole_vectors(F.silu, gate) * up


def silu_mul_triton(x: Tensor) -> Tensor:
    x = x.contiguous()
    rows, width = x.shape[0], x.shape[1] // 2
    expect("x", x, (rows, 2 * width), *FLOATS)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    _silu_mul[(rows, triton.cdiv(width, 1024))](x, y, width, BLOCK=1024, **pdl(x), num_warps=4)
    return y


@triton.jit
def _silu_mul(x, y, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < width
    gate = tl.load(x + row * 2 * width + column, mask=used, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=used, other=0.0).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + column, (activated * up).to(y.dtype.element_ty), mask=used)
