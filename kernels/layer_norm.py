"""Layer norm of a sum kept in two parts: rows, and a vector that stands for the biases not yet added to them.

    y = (z - mean(z)) * rsqrt(variance(z) + eps) * weight + bias,   z = x + offset

x [rows, width]; offset float32 [width], the same for every row; weight and bias [width]. All in float32, rounded to x's
dtype once. The offset lets a residual stream be summed by matrix products alone (kernels/linear.py).
Cost: each row read once and written once; bound by bandwidth.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.expect import FLOATS, expect
from kernels.lang import pdl, tl, triton, use_triton


def layer_norm(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Norm of the rows of `x + offset`, of x's shape [rows, width] and dtype."""
    return (layer_norm_triton if use_triton(x) else layer_norm_reference)(x, offset, weight, bias, eps)


def layer_norm_reference(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    wide = x.to(offset.dtype) + offset
    return F.layer_norm(wide, offset.shape, weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)


def layer_norm_triton(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    rows, width = x.shape
    expect("x", x, x.shape, *FLOATS)
    expect("offset", offset, (width,), torch.float32)
    expect("weight", weight, (width,), *FLOATS)
    expect("bias", bias, (width,), *FLOATS)
    y = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _layer_norm[(rows,)](x, offset, weight, bias, y, width, eps, BLOCK=block, **pdl(x), num_warps=4)
    return y


@triton.jit
def _layer_norm(x, offset, weight, bias, y, width, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    used = column < width
    w = tl.load(weight + column, mask=used, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=used, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    z = tl.load(x + row * width + column, mask=used, other=0.0).to(tl.float32)
    z += tl.load(offset + column, mask=used, other=0.0)
    centred = tl.where(used, z - tl.sum(z, 0) / width, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(y + row * width + column, (centred * scale * w + b).to(y.dtype.element_ty), mask=used)
