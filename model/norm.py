"""Root-mean-square norm with a learned weight."""

import torch
from torch import Tensor, nn

from kernels.norm import add_rms_norm, add_rms_norm_rows, rms_norm


class RMSNorm(nn.Module):
    """Norm of the last dimension, [..., width] to the same shape and dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`residual + x` normed, and the sum itself; no residual is one of zeros."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)

    def add_rows(self, x: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
        """`residual + x` normed, of the given rows only: x, residual [T, width], rows int64 [R] to [R, width]."""
        return add_rms_norm_rows(x, residual, rows, self.weight, self.eps)
