"""From the tower's patch features to image tokens of the language model: 2x2 merge, then an MLP."""

import math

from torch import Tensor, nn

from kernels.patches import merge_patches
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
        side = math.isqrt(features.shape[1])
        tokens: Tensor = self.layers(merge_patches(features, side, self.downsample_ratio))
        return tokens
