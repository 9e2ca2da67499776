"""Pure rotary position embedding of the decoder: base frequencies, no scaling (no YaRN)."""

import torch
from torch import Tensor, nn

from kernels.rope_cache import rope_frequencies, rope_tables
from model.config import LanguageConfig


class RotaryEmbedding(nn.Module):
    """int64 positions [T] to cos and sin, float32 [T, rope_head_dim / 2], once a step for all layers."""

    frequencies: Tensor

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        # On the CPU whatever the device context, so that a model built on "meta" holds real values.
        frequencies = rope_frequencies(config.rope_head_dim, config.rope_theta, torch.device("cpu"))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.frequencies)
