"""The DeepSeek-V2 decoder: embedding, layers, final norm, output matrix, over a batch of ragged rows."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.attention_backend import AttentionBackend
from kernels.linear import float32_linear
from kernels.prefetch import Prefetcher
from model.attention import LatentAttention, MultiHeadAttention
from model.batch import Batch
from model.config import LanguageConfig
from model.moe import MLP, MixtureOfExperts
from model.norm import RMSNorm
from model.rope import RotaryEmbedding


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The residual sum is handed on with its last term not yet added, for the next norm."""

    def __init__(self, config: LanguageConfig, index: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        attention = LatentAttention if config.use_mla else MultiHeadAttention
        self.attention = attention(config, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (
            MixtureOfExperts(config)
            if config.is_moe_layer(index)
            else MLP(config.hidden_size, config.intermediate_size)
        )

    def known_weights(self) -> list[Tensor]:
        """Those that any token needs, from attention's output on, in the order of their use."""
        weights = [self.attention.o_proj.weight]
        return weights + self.mlp.shared_weights() if isinstance(self.mlp, MixtureOfExperts) else weights

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        batch: Batch,
        kv_cache: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(hidden_states, residual), both [T, hidden_size]: the layer's output is their sum, and so is its input."""
        normed, residual = self.input_layernorm.add(hidden_states, residual)
        attended = self.attention(normed, rotary, batch, kv_cache)
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self.mlp(normed), residual


class LanguageModel(nn.Module):
    def __init__(self, config: LanguageConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.batch_invariant = False
        # Not initialised: torch's default would import its compiler for a model on "meta", a second or more.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(DecoderLayer(config, index, backend) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def embed(self, token_ids: Tensor, image_rows: Tensor | None, image_embeds: Tensor | None) -> Tensor:
        """[T, hidden_size]: the tokens' embeddings, or a picture's features where it stands; see `Batch`."""
        hidden_states: Tensor = self.embed_tokens(token_ids)
        if image_rows is not None and image_embeds is not None:
            hidden_states = hidden_states.index_copy(0, image_rows, image_embeds)
        return hidden_states

    def forward(
        self,
        batch: Batch,
        kv_cache: Sequence[Tensor],
        out: Tensor | None = None,
        hidden_states: Tensor | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> Tensor:
        """Logits, float32 [R, vocab_size], of the batch's `logits_rows`; writes the step's rows into `kv_cache`.

        kv_cache: one tensor a layer, [pages, PAGE_SIZE, kv_row_size], in the model's dtype. `out` takes the logits, if
        given. hidden_states: what `embed` makes of the batch, if that is done. prefetcher: fetches each layer's known
        weights while its attention runs.
        """
        if hidden_states is None:
            hidden_states = self.embed(batch.token_ids, batch.image_rows, batch.image_embeds)
        rotary = self.rotary(batch.positions)
        residual = None
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            assert isinstance(layer, DecoderLayer)
            if prefetcher is not None:
                prefetcher.start(layer.known_weights())
            hidden_states, residual = layer(hidden_states, residual, rotary, batch, layer_cache)
        assert residual is not None  # there is a layer at least
        normed = self.norm.add_rows(hidden_states, residual, batch.logits_rows)
        logits = float32_linear(normed, self.lm_head.weight, out, batch_invariant=self.batch_invariant)
        if prefetcher is not None:
            prefetcher.join()
        return logits
