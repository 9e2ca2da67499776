"""Decode attention of MLA in absorbed form: one query a sequence over its latent pages (DeepSeek-V2, section 2.1).

With W_UK folded into the query and W_UV onto the output, all heads share one key and value: a cache
row is key (latent and rotated part, rank + rope wide), its first `rank` values are the value too:

    out[b, h] = sum_j softmax_j(scale * query[b, h] . row[j]) row[j, :rank]

query [B, heads, rank + rope], kv_cache [pages, PAGE_SIZE, rank + rope], block_table int32 [B, P],
context_lens int32 [B]. Cost: each cached row read once (1152 bytes at full size in bfloat16) and
4 * heads * (rank + rope / 2) operations on it; bound by bandwidth up to some hundred heads.
A row with context_lens 0 gives zeros.
"""

import torch
from torch import Tensor


def mla_decode(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, rank: int, scale: float
) -> Tensor:
    """[B, heads, rank] in query's dtype; shapes as in this file's head."""
    return mla_decode_reference(query, kv_cache, block_table, context_lens, rank=rank, scale=scale)


def mla_decode_reference(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, rank: int, scale: float
) -> Tensor:
    rows = kv_cache[block_table.long()].flatten(1, 2)
    empty = torch.arange(rows.shape[1], device=rows.device) >= context_lens[:, None]
    # Unused rows of a page hold whatever was there: a zero weight alone would let a NaN through.
    rows = rows.masked_fill(empty[..., None], 0)
    scores = torch.einsum("bhd,bsd->bhs", query.float(), rows.float()) * scale
    weights = scores.masked_fill(empty[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhs,bsr->bhr", weights, rows[..., :rank].float()).to(query.dtype)
