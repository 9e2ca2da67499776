"""Root-mean-square norm, alone and fused with the residual add before it.

    y = weight * cast(x * rsqrt(mean(x^2) + eps))

x: [..., width]; the mean, the root and the product are float32, the result is cast back to x's
dtype and only then multiplied by the weight, as the reference does (it shows in bfloat16).
Cost: each row read once and written once (twice with the residual); bound by bandwidth.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm of the last dimension. x [..., width], weight [width]; returns x's shape and dtype."""
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual + x`, and its norm: (normed, sum), both of x's shape [..., width] and dtype."""
    total = residual + x
    return rms_norm_reference(total, weight, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)
