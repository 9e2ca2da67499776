"""Root-mean-square norm, alone and fused with the residual add before it.

    y = weight * cast(x * rsqrt(mean(x^2) + eps))

x: [..., width]; the mean, the root and the product are float32, the result is cast back to x's
dtype and only then multiplied by the weight, as the reference does (it shows in bfloat16).
Cost: each row read once and written once (twice with the residual); bound by bandwidth.
"""

import torch
from torch import Tensor

from kernels.lang import tl, triton, use_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of the last dimension. x [..., width], weight [width]; returns x's shape and dtype."""
    if use_triton(x):
        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual + x`, and its norm: (normed, sum), both of x's shape [..., width] and dtype."""
    if use_triton(x):
        return add_rms_norm_triton(x, residual, weight, eps)
    total = residual + x
    return rms_norm_reference(total, weight, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    out = torch.empty_like(rows)
    block = triton.next_power_of_2(width)
    _norm[(len(rows),)](rows, rows, weight, out, out, width, rows.stride(0), eps, BLOCK=block, ADD=False, num_warps=8)
    return out.view(x.shape)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows, added = x.reshape(-1, width), residual.reshape(-1, width).contiguous()
    out, total = torch.empty_like(added), torch.empty_like(added)
    block = triton.next_power_of_2(width)
    _norm[(len(rows),)](rows, added, weight, out, total, width, rows.stride(0), eps, BLOCK=block, ADD=True, num_warps=8)
    return out.view(x.shape), total.view(x.shape)


@triton.jit
def _norm(rows, residual, weight, out, total, width, row_stride, eps, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    used = column < width
    x = tl.load(rows + row * row_stride + column, mask=used, other=0.0)
    if ADD:
        x = x + tl.load(residual + row * width + column, mask=used, other=0.0)
        tl.store(total + row * width + column, x, mask=used)
    wide = x.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    w = tl.load(weight + column, mask=used, other=0.0)
    tl.store(out + row * width + column, w * scaled.to(x.dtype), mask=used)
