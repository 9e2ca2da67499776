"""The whole DeepSeek-VL2: tower and projector for pictures, decoder for text, and a picture's tokens in order."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.attention_backend import AttentionBackend
from kernels.prefetch import Prefetcher
from model.attention import LatentAttention, MultiHeadAttention
from model.batch import Batch, upload
from model.config import ModelConfig
from model.image import image_layout
from model.language import LanguageModel
from model.linear import Linear
from model.moe import Experts, Router
from model.projector import Projector
from model.vision import VisionTower

BATCH_INVARIANT = (Linear, LatentAttention, MultiHeadAttention, Router, Experts, LanguageModel)
"""Modules that can compute rows without regard to the others."""


class DeepseekVL2(nn.Module):
    def __init__(self, config: ModelConfig, backend: AttentionBackend = AttentionBackend.TORCH) -> None:
        """backend: what prefill attention takes, see kernels/attention_backend.py."""
        super().__init__()
        self.config = config
        self.attention_backend = backend
        self.vision = VisionTower(config.vision)
        self.projector = Projector(config.projector)
        self.image_newline = nn.Parameter(torch.empty(config.language.hidden_size))
        self.view_separator = nn.Parameter(torch.empty(config.language.hidden_size))
        self.language = LanguageModel(config.language, backend)

    def make_batch_invariant(self) -> None:
        """From now on a decode row's numbers do not depend on the others on CUDA either, at some cost.

        Nor do those of a prompt's tokens if they are laid out as decode rows, and those of a
        tile if it is encoded alone. To be called before the first forward pass.
        """
        for module in self.language.modules():
            if isinstance(module, BATCH_INVARIANT):
                module.batch_invariant = True

    def encode_tiles(self, tiles: Tensor) -> Tensor:
        """uint8 [n, 3, 384, 384] to image tokens [n, 196, hidden_size]."""
        tokens: Tensor = self.projector(self.vision(tiles))
        return tokens

    def assemble_image(self, features: Tensor, columns: int, rows: int) -> Tensor:
        """One picture's tokens in the order of the prompt, with newlines and separator: [slots, hidden_size].

        features [1 + columns * rows, 196, hidden_size]: the global view's, then the local tiles' row by row.
        """
        (layout,) = upload([image_layout(columns, rows).astype("int64")], features.device)
        flat = features.flatten(0, 1)
        table = torch.cat((flat, self.image_newline[None], self.view_separator[None]))
        # The layout's -1 (newline) and -2 (separator) follow the features in the table.
        return table[torch.where(layout < 0, len(flat) - 1 - layout, layout)]

    def forward(
        self,
        batch: Batch,
        kv_cache: Sequence[Tensor],
        out: Tensor | None = None,
        hidden_states: Tensor | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> Tensor:
        """Logits, float32 [R, vocab_size]; see LanguageModel.forward."""
        logits: Tensor = self.language(batch, kv_cache, out, hidden_states, prefetcher)
        return logits
