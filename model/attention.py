"""The decoder's attention over the paged cache: multi-head latent attention, and plain multi-head (tiny).

Both write the step's own cache rows first, then attend: decoding rows over their pages, prefill chunks
over their sequence's rows gathered from the pages, so that chunks and cached context take one path.
Chunks come last, so that they overwrite what rows for decoding that are empty gave (see `Batch`).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.attention_backend import AttentionBackend
from kernels.head_linear import head_linear
from kernels.latent_write import write_latents
from kernels.mha_decode import mha_decode
from kernels.mla_decode import mla_decode
from kernels.prefill_attention import prefill_attention
from kernels.rope_cache import apply_rope_half, read_rows, write_rows
from model.batch import Batch, DecodeRows, PrefillRows
from model.config import LanguageConfig
from model.linear import Linear
from model.norm import RMSNorm

LATENT_NORM_EPS = 1e-6
"""Of the norms inside MLA, whatever rms_norm_eps says (as in the reference)."""


class LatentAttention(nn.Module):
    """MLA (DeepSeek-V2, section 2.1): the cache keeps one normalised latent and one rotated key a token.

    Prefill expands latents to keys (nope + rope) and values of every head; decode keeps them, with the
    key half of `kv_b_proj` folded into the query and the value half onto the output.
    """

    def __init__(self, config: LanguageConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend
        self.heads = config.num_attention_heads
        self.nope, self.rope = config.nope_head_dim, config.rope_head_dim
        self.rank, self.value = config.latent_rank, config.value_head_dim
        self.scale = config.softmax_scale
        self.batch_invariant = False
        query_width = self.heads * config.qk_head_dim
        self.query_rows = config.query_rank or query_width
        self.q_kv_a_proj = Linear(config.hidden_size, self.query_rows + self.rank + self.rope, bias=False)
        if config.query_rank:
            self.q_a_layernorm = RMSNorm(config.query_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.query_rank, query_width, bias=False)
        self.low_rank_query = config.query_rank > 0
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = Linear(self.heads * self.value, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], batch: Batch, kv_cache: Tensor) -> Tensor:
        """hidden_states [T, hidden_size], rotary cos and sin [T, rope / 2], kv_cache [pages, PAGE_SIZE, row]."""
        query, latent = self.q_kv_a_proj(hidden_states).split((self.query_rows, self.rank + self.rope), dim=-1)
        if self.low_rank_query:
            query = self.q_b_proj(self.q_a_layernorm(query))
        query = query.unflatten(-1, (self.heads, self.nope + self.rope))
        norm = self.kv_a_layernorm
        write_latents(query, latent, norm.weight, rotary, kv_cache, batch.slots, rope=self.rope, eps=norm.eps)
        attended = _attend(query, batch, kv_cache, self._decode, self._prefill)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def _decode(self, query: Tensor, rows: DecodeRows, kv_cache: Tensor) -> Tensor:
        """query [B, heads, nope + rope], rotated, to [B, heads, value]."""
        expansion = self.kv_b_proj.weight.unflatten(0, (self.heads, -1))
        key_weight, value_weight = expansion.split((self.nope, self.value), dim=1)
        attended = mla_decode(
            head_linear(query[..., : self.nope], key_weight, batch_invariant=self.batch_invariant),
            query[..., self.nope :],
            kv_cache,
            rows.block_table,
            rows.context_lens,
            scale=self.scale,
            batch_invariant=self.batch_invariant,
        )
        return head_linear(attended, value_weight.transpose(1, 2), batch_invariant=self.batch_invariant)

    def _prefill(self, query: Tensor, rows: PrefillRows, kv_cache: Tensor, out: Tensor | None) -> Tensor:
        """query [rows of prefill, heads, nope + rope], rotated, to [rows of prefill, heads, value]."""
        latent, key_rope = read_rows(kv_cache, rows.key_slots).split((self.rank, self.rope), dim=-1)
        expanded = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))
        key_nope, value = expanded.split((self.nope, self.value), dim=-1)
        return prefill_attention(
            query,
            key_nope,
            value,
            key_rope,
            query_lens=rows.query_lens,
            key_lens=rows.key_lens,
            cu_query_lens=rows.cu_query_lens,
            cu_key_lens=rows.cu_key_lens,
            scale=self.scale,
            backend=self.backend,
            out=out,
        )


class MultiHeadAttention(nn.Module):
    """Attention of tiny: the cache keeps rotated keys and values of every head, keys first in a row."""

    def __init__(self, config: LanguageConfig, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend
        self.heads, self.head_dim = config.num_attention_heads, config.qk_head_dim
        self.scale = config.softmax_scale
        self.batch_invariant = False
        self.qkv_proj = Linear(config.hidden_size, 3 * self.heads * self.head_dim, bias=False)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, rotary: tuple[Tensor, Tensor], batch: Batch, kv_cache: Tensor) -> Tensor:
        """hidden_states [T, hidden_size], rotary cos and sin [T, head_dim / 2], kv_cache [pages, PAGE_SIZE, row]."""
        query, key, value = self.qkv_proj(hidden_states).unflatten(-1, (3, self.heads, self.head_dim)).unbind(1)
        query, key = apply_rope_half(query, *rotary), apply_rope_half(key, *rotary)
        write_rows(kv_cache, batch.slots, torch.stack((key, value), dim=1).flatten(1))
        attended = _attend(query, batch, kv_cache, self._decode, self._prefill)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def _decode(self, query: Tensor, rows: DecodeRows, kv_cache: Tensor) -> Tensor:
        """query [B, heads, head_dim], rotated, to the same."""
        invariant = self.batch_invariant
        return mha_decode(
            query, kv_cache, rows.block_table, rows.context_lens, scale=self.scale, batch_invariant=invariant
        )

    def _prefill(self, query: Tensor, rows: PrefillRows, kv_cache: Tensor, out: Tensor | None) -> Tensor:
        """query [rows of prefill, heads, head_dim], rotated, to the same."""
        cached = read_rows(kv_cache, rows.key_slots).unflatten(-1, (2, self.heads, self.head_dim))
        return prefill_attention(
            query,
            cached[:, 0],
            cached[:, 1],
            query_lens=rows.query_lens,
            key_lens=rows.key_lens,
            cu_query_lens=rows.cu_query_lens,
            cu_key_lens=rows.cu_key_lens,
            scale=self.scale,
            backend=self.backend,
            out=out,
        )


def _attend(
    query: Tensor,
    batch: Batch,
    kv_cache: Tensor,
    decode: Callable[[Tensor, DecodeRows, Tensor], Tensor],
    prefill: Callable[[Tensor, PrefillRows, Tensor, Tensor | None], Tensor],
) -> Tensor:
    """All rows' attention, [T, heads, width], with one copy at most: of the decodes where there are chunks too."""
    if batch.decode is None:
        assert batch.prefill is not None  # there is a row at least
        return prefill(query, batch.prefill, kv_cache, None)
    decoded = decode(query[: len(batch.decode.context_lens)], batch.decode, kv_cache)
    if batch.prefill is None:
        return decoded
    attended = torch.empty(len(query), *decoded.shape[1:], dtype=decoded.dtype, device=decoded.device)
    attended[: len(decoded)] = decoded
    first = batch.prefill.first_row
    prefill(query[first:], batch.prefill, kv_cache, attended[first:])
    return attended
