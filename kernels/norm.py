"""Root-mean-square norm, alone and fused with the residual add before it.

    y = weight * cast(x * rsqrt(mean(x^2) + eps))

x: [..., width]; the mean, the root and the product are float32, the result is cast back to x's
dtype and only then multiplied by the weight, as the reference does (it shows in bfloat16).
Cost: each row read once and written once (twice with the residual); bound by bandwidth.
"""

import torch
from torch import Tensor

from kernels.expect import FLOATS, expect, expect_rows
from kernels.lang import pdl, tl, triton, use_triton


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


def add_rms_norm_rows(x: Tensor, residual: Tensor, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of `residual + x` at `rows`, int64 [R], of both [T, width]: [R, width] in x's dtype."""
    if use_triton(x):
        return add_rms_norm_rows_triton(x, residual, rows, weight, eps)
    return rms_norm_reference(residual[rows] + x[rows], weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    _launch(rows, None, None, weight, out, None, eps)
    return out.view(x.shape)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    rows, added = x.reshape(-1, width), residual.reshape(-1, width).contiguous()
    out, total = torch.empty_like(added), torch.empty_like(added)
    _launch(rows, added, None, weight, out, total, eps)
    return out.view(x.shape), total.view(x.shape)


def add_rms_norm_rows_triton(x: Tensor, residual: Tensor, rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(len(rows), x.shape[1], dtype=x.dtype, device=x.device)
    _launch(x, residual.contiguous(), rows, weight, out, None, eps)
    return out


def _launch(
    x: Tensor,
    residual: Tensor | None,
    chosen: Tensor | None,
    weight: Tensor,
    out: Tensor,
    total: Tensor | None,
    eps: float,
) -> None:
    """One program for each row of `out`. Where an argument is None, so is its part of the work."""
    count, width = out.shape
    expect_rows("x", x, (len(x), width), *FLOATS)
    expect("weight", weight, (width,), out.dtype)
    if residual is not None:
        expect("residual", residual, x.shape, out.dtype)
    if chosen is not None:
        expect("rows", chosen, (count,), torch.int64)
    _norm[(count,)](
        x,
        residual,
        chosen,
        weight,
        out,
        total,
        width,
        x.stride(0),
        eps,
        BLOCK=triton.next_power_of_2(width),
        **pdl(x),
        num_warps=8,
    )


@triton.jit
def _norm(x, residual, chosen, weight, out, total, width, x_stride, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    target = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    used = column < width
    w = tl.load(weight + column, mask=used, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = target
    if chosen is not None:
        row = tl.load(chosen + target)
    z = tl.load(x + row * x_stride + column, mask=used, other=0.0)
    if residual is not None:
        z = z + tl.load(residual + row * width + column, mask=used, other=0.0)
    if total is not None:
        tl.store(total + target * width + column, z, mask=used)
    wide = z.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + target * width + column, w * scaled.to(z.dtype), mask=used)
