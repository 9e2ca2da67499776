"""Decode attention over head pages (tiny): one query a sequence, keys and values kept per head.

    out[b, h] = sum_j softmax_j(scale * query[b, h] . key[j, h]) value[j, h]

query [B, heads, dim]; kv_cache [pages, PAGE_SIZE, 2 * heads * dim], a row holding all keys and then all
values; block_table [B, P] and context_lens [B] of any integer type. Cost: each cached row read once; bound by
bandwidth. A row with context_lens 0 gives zeros.

The Triton form is split-KV flash decoding as in kernels/mla_decode.py, a program for each head: with one query
a key there is no product for the matrix units.
"""

import torch
from torch import Tensor

from kernels.lang import tl, triton, use_triton
from kernels.mla_decode import combine_splits, num_splits

_TOKENS = 32
"""Tokens a program looks at together: half a page, so that no block crosses pages."""


def mha_decode(query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, scale: float) -> Tensor:
    """[B, heads, dim] in query's dtype; shapes as in this file's head."""
    fits = query.shape[2] & (query.shape[2] - 1) == 0 and query.stride(2) == 1
    chosen = mha_decode_triton if use_triton(query) and fits else mha_decode_reference
    return chosen(query, kv_cache, block_table, context_lens, scale=scale)


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


def mha_decode_triton(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, context_lens: Tensor, *, scale: float
) -> Tensor:
    batch, heads, dim = query.shape
    splits = num_splits(batch * heads, block_table.shape[1] * kv_cache.shape[1])
    partial = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=query.device)
    stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=query.device)
    _attend_head[(batch, heads, splits)](
        query,
        kv_cache,
        block_table,
        context_lens,
        partial,
        stats,
        scale,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        DIM=dim,
        PAGE=kv_cache.shape[1],
        TOKENS=_TOKENS,
        num_warps=4,
        num_stages=3,
    )
    return combine_splits(partial, stats, query.dtype)


@triton.jit
def _attend_head(
    query,
    kv_cache,
    block_table,
    context_lens,
    partial,
    stats,
    scale,
    query_stride,
    head_stride,
    table_stride,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One split of one sequence and head: running softmax over its tokens."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    splits = tl.num_programs(2)
    channel = tl.arange(0, DIM)

    length = tl.load(context_lens + sequence)
    blocks = tl.cdiv(length, TOKENS)
    share = tl.cdiv(blocks, splits)
    first, last = split * share, tl.minimum((split + 1) * share, blocks)
    q = tl.load(query + sequence.to(tl.int64) * query_stride + head * head_stride + channel).to(tl.float32) * scale

    maximum = float("-inf")
    total = 0.0
    acc = tl.zeros((DIM,), tl.float32)
    for block in range(first, last):
        token = block * TOKENS + tl.arange(0, TOKENS)
        page = tl.load(block_table + sequence * table_stride + block * TOKENS // PAGE).to(tl.int64)
        used = token < length
        row = kv_cache + (page * PAGE + (token % PAGE)[:, None]) * (2 * heads * DIM) + head * DIM + channel[None, :]
        keys = tl.load(row, mask=used[:, None], other=0.0).to(tl.float32)
        values = tl.load(row + heads * DIM, mask=used[:, None], other=0.0).to(tl.float32)
        scores = tl.where(used, tl.sum(keys * q[None, :], 1), float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 0))
        weights = tl.exp(scores - new_maximum)
        shrink = tl.exp(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(values * weights[:, None], 0)
        maximum = new_maximum

    cell = (sequence * heads + head).to(tl.int64) * splits + split
    tl.store(partial + cell * DIM + channel, acc)
    tl.store(stats + cell * 2, maximum)
    tl.store(stats + cell * 2 + 1, total)
