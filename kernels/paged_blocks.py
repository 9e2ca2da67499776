"""The decode kernels' work on a CPU: attention over cached rows in plain torch, the same bits for a token in any batch.

Keys are taken in blocks of one size from the sequence's start, products have enough rows for the blocked form (see
kernels/batch_invariant.py), and what a token does not see enters sums as zeros at their end. So a token computed
alone, in a chunk of any length, beside others, or again after a preemption, is the same token. Rows with the same
block table are tokens of one sequence, whose cached rows are then read once for all of them.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_invariant import padded_rows, whole_vectors

BLOCK = 256
"""Keys taken together."""

_QUERIES = 1024
"""Most queries of a sequence taken together, so that their scores stay small."""


def mla_decode_blocks(
    query_latent: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """[B, heads, rank]; shapes as in kernels/mla_decode.py."""
    rank, heads = query_latent.shape[-1], query_latent.shape[1]
    query = torch.cat((query_latent, query_rope), dim=-1).float()
    outputs = []
    for part, sequences in _runs(block_table):
        lengths = context_lens[part].view(sequences, -1)
        rows = _cached_rows(kv_cache, block_table[part].unflatten(0, lengths.shape)[:, 0], lengths)[:, None]
        # All heads see the same rows: to the product a head is a query as another token is.
        queries = query[part].reshape(sequences, 1, -1, query.shape[-1])
        attended = _attend(queries, rows, rows[..., :rank], lengths.repeat_interleave(heads, dim=1), scale)
        outputs.append(attended.reshape(-1, heads, rank))
    return torch.cat(outputs).to(query_latent.dtype)


def mha_decode_blocks(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, scale: float
) -> Tensor:
    """[B, heads, dim]; shapes as in kernels/mha_decode.py."""
    outputs = []
    for part, sequences in _runs(block_table):
        lengths = context_lens[part].view(sequences, -1)
        rows = _cached_rows(kv_cache, block_table[part].unflatten(0, lengths.shape)[:, 0], lengths)
        keys, values = rows.unflatten(-1, (2, *query.shape[1:])).permute(2, 0, 3, 1, 4)
        queries = query[part].float().unflatten(0, lengths.shape).transpose(1, 2)
        outputs.append(_attend(queries, keys, values, lengths, scale).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).to(query.dtype)


def _runs(block_table: Tensor) -> Iterator[tuple[slice, int]]:
    """The rows of block_table [B, P] in parts, and of how many sequences each is: some of one row, or one of many."""
    new = torch.ones(len(block_table), dtype=torch.bool)
    new[1:] = (block_table[1:] != block_table[:-1]).any(1)
    starts = [*new.nonzero()[:, 0].tolist(), len(block_table)]
    first = 0
    for start, end in pairwise(starts):
        if end - start > 1:
            if start > first:
                yield slice(first, start), start - first
            yield slice(start, end), 1
            first = end
    if len(block_table) > first:
        yield slice(first, len(block_table)), len(block_table) - first


def _cached_rows(kv_cache: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """The cached rows of sequences with tables [G, P] up to the longest of lengths [G, n], float32 [G, S, row].

    S is a multiple of BLOCK. Rows that no token sees are zeros: they hold whatever was there, and a zero weight alone
    would let a NaN through.
    """
    longest = int(lengths.max())
    rows = kv_cache[tables[:, : -(-longest // kv_cache.shape[1])].long()].flatten(1, 2).float()
    unused = torch.arange(rows.shape[1]) >= lengths.amax(1, keepdim=True)
    rows = rows.masked_fill(unused[..., None], 0)[:, :longest]
    return F.pad(rows, (0, 0, 0, -longest % BLOCK if longest else BLOCK))


def _attend(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """[G, H, n, v]: softmax(scale * query . key) over the first lengths[g, i] keys; zeros where that is none.

    query float32 [G, H, n, d], keys [G, H, S, d], values [G, H, S, v], lengths [G, n] of any integer type.
    """
    parts = zip(query.split(_QUERIES, dim=2), lengths.split(_QUERIES, dim=1), strict=True)
    return torch.cat([_attend_some(part, keys, values, limit, scale) for part, limit in parts], dim=2)


def _attend_some(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor:
    count = query.shape[2]
    padding = padded_rows(count) - count
    query, lengths = F.pad(query, (0, 0, 0, padding)), F.pad(lengths, (0, padding))
    scores = torch.cat([query @ block.transpose(2, 3) for block in keys.split(BLOCK, dim=2)], dim=3) * scale
    unseen = torch.arange(keys.shape[2]) >= lengths[:, None, :, None]
    scores = scores.masked_fill_(unseen, -torch.inf)
    lowest = torch.finfo(scores.dtype).min  # a token that sees nothing would have infinity less infinity
    weights = whole_vectors(torch.exp, scores - scores.amax(-1, keepdim=True).clamp(min=lowest))
    total, out = torch.zeros_like(query[..., :1]), values.new_zeros(*query.shape[:3], values.shape[-1])
    for part, block in zip(weights.split(BLOCK, dim=3), values.split(BLOCK, dim=2), strict=True):
        total += part.sum(-1, keepdim=True)
        out += part @ block
    return (out / total.clamp(min=1e-30))[:, :, :count]
