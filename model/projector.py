"""From the tower's patch features to image tokens of the language model: 2x2 merge, then an MLP."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ProjectorConfig


class Projector(nn.Module):
    """Features [n, side^2, input_dim] to image tokens [n, ceil(side / 2)^2, n_embed]."""

    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        self.downsample_ratio = config.downsample_ratio
        self.layers = nn.Sequential(
            nn.Linear(config.input_dim * config.downsample_ratio**2, config.n_embed),
            nn.GELU(),  # the exact (erf) form, unlike the tower's
            nn.Linear(config.n_embed, config.n_embed),
        )

    def forward(self, features: Tensor) -> Tensor:
        tokens: Tensor = self.layers(self._merge(features))
        return tokens

    def _merge(self, features: Tensor) -> Tensor:
        """Neighbouring ratio x ratio patches become one row, channel-major; the grid is padded bottom and right."""
        side = math.isqrt(features.shape[1])
        padding = -side % self.downsample_ratio
        grid = features.transpose(1, 2).unflatten(-1, (side, side))
        grid = F.pad(grid, (0, padding, 0, padding))
        return F.unfold(grid, kernel_size=self.downsample_ratio, stride=self.downsample_ratio).transpose(1, 2)
