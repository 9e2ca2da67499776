"""Decode attention over head pages (tiny): one query a sequence, keys and values kept per head.

    out[b, h] = sum_j softmax_j(scale * query[b, h] . key[j, h]) value[j, h]

query [B, heads, dim]; kv_cache [pages, PAGE_SIZE, 2 * heads * dim], a row holding all keys and then all
values; block_table int32 [B, P], context_lens int32 [B]. Cost: each cached row read once; bound by
bandwidth. A row with context_lens 0 gives zeros.
"""

import torch
from torch import Tensor


def mha_decode(query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, scale: float) -> Tensor:
    """[B, heads, dim] in query's dtype; shapes as in this file's head."""
    return mha_decode_reference(query, kv_cache, block_table, context_lens, scale=scale)


def mha_decode_reference(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, scale: float
) -> Tensor:
    rows = kv_cache[block_table.long()].flatten(1, 2)
    empty = torch.arange(rows.shape[1], device=rows.device) >= context_lens[:, None]
    # Unused rows of a page hold whatever was there: a zero weight alone would let a NaN through.
    rows = rows.masked_fill(empty[..., None], 0).unflatten(-1, (2, *query.shape[1:])).float()
    scores = torch.einsum("bhd,bshd->bhs", query.float(), rows[:, :, 0]) * scale
    weights = scores.masked_fill(empty[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhs,bshd->bhd", weights, rows[:, :, 1]).to(query.dtype)
