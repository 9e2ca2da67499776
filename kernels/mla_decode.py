"""Decode attention of MLA in absorbed form: one query a sequence over its latent pages (DeepSeek-V2, section 2.1).

With W_UK folded into the query and W_UV onto the output, all heads share one key and value: a cache
row is key (latent and rotated part, rank + rope wide), its first `rank` values are the value too:

    out[b, h] = sum_j softmax_j(scale * query[b, h] . row[j]) row[j, :rank]

The query comes in its two parts, query_latent [B, heads, rank] and query_rope [B, heads, rope], each with
strides of its own; kv_cache [pages, PAGE_SIZE, rank + rope], block_table [B, P] and context_lens [B] of any
integer type. Cost: each cached row read once (1152 bytes at full size in bfloat16) and
4 * heads * (rank + rope / 2) operations on it; bound by bandwidth up to some hundred heads.
A row with context_lens 0 gives zeros.

The Triton form is split-KV flash decoding: a sequence's pages are dealt to `splits` programs, each of
which keeps a running maximum m, sum l and accumulator over its tokens; a second kernel combines them:

    out = sum_s exp(m_s - m) acc_s / sum_s exp(m_s - m) l_s,   m = max_s m_s
"""

import torch
from torch import Tensor

from kernels.lang import tl, triton, use_triton

_TOKENS = 32
"""Tokens a program looks at together: half a page, so that no block crosses pages."""


def mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """[B, heads, rank] in the query's dtype; shapes as in this file's head."""
    chosen = mla_decode_reference
    if use_triton(query_latent) and _fits_triton(query_latent, query_rope):
        chosen = mla_decode_triton
    return chosen(query_latent, query_rope, kv_cache, block_table, context_lens, scale=scale)


def mla_decode_reference(
    query_latent: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    query, rank = torch.cat((query_latent, query_rope), dim=-1), query_latent.shape[-1]
    rows = kv_cache[block_table.long()].flatten(1, 2)
    empty = torch.arange(rows.shape[1], device=rows.device) >= context_lens[:, None]
    # Unused rows of a page hold whatever was there: a zero weight alone would let a NaN through.
    rows = rows.masked_fill(empty[..., None], 0)
    scores = torch.einsum("bhd,bsd->bhs", query.float(), rows.float()) * scale
    weights = scores.masked_fill(empty[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhs,bsr->bhr", weights, rows[..., :rank].float()).to(query.dtype)


def mla_decode_triton(
    query_latent: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    (batch, heads, rank), rope = query_latent.shape, query_rope.shape[-1]
    device, dtype = query_latent.device, query_latent.dtype
    splits = num_splits(batch, block_table.shape[1] * kv_cache.shape[1])
    partial = torch.empty(batch, heads, splits, rank, dtype=torch.float32, device=device)
    stats = torch.empty(batch, heads, splits, 2, dtype=torch.float32, device=device)
    _attend[(batch, triton.cdiv(heads, 16), splits)](
        query_latent,
        query_rope,
        kv_cache,
        block_table,
        context_lens,
        partial,
        stats,
        scale,
        heads,
        query_latent.stride(0),
        query_latent.stride(1),
        query_rope.stride(0),
        query_rope.stride(1),
        block_table.stride(0),
        splits,
        RANK=rank,
        ROPE=rope,
        PAGE=kv_cache.shape[1],
        TOKENS=_TOKENS,
        num_warps=4,
        num_stages=3,
    )
    return combine_splits(partial, stats, dtype)


def combine_splits(partial: Tensor, stats: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, heads, width] of the splits' accumulators [B, heads, splits, width] and (maximum, sum) [B, heads, splits, 2].

    All float32; width a power of two. Where no split saw a token the result is zero.
    """
    batch, heads, splits, width = partial.shape
    out = torch.empty(batch, heads, width, dtype=dtype, device=partial.device)
    block = triton.next_power_of_2(splits)
    _combine[(batch, heads)](partial, stats, out, splits, SPLITS=block, WIDTH=width, num_warps=4)
    return out


def num_splits(batch: int, longest: int) -> int:
    """Programs for each of `batch` rows of up to `longest` tokens.

    Enough for two a multiprocessor in all, none for less than four blocks of tokens.
    """
    wanted = -(-264 // batch)
    return max(1, min(wanted, -(-longest // (4 * _TOKENS))))


def _fits_triton(query_latent: Tensor, query_rope: Tensor) -> bool:
    """Blocks are whole latents and rope parts, whose widths must be powers of two and no less than a dot's 16."""
    widths = (query_latent.shape[-1], query_rope.shape[-1])
    dense = query_latent.stride(-1) == query_rope.stride(-1) == 1
    return dense and all(width >= 16 and width & (width - 1) == 0 for width in widths)


@triton.jit
def _attend(
    query_latent,
    query_rope,
    kv_cache,
    block_table,
    context_lens,
    partial,
    stats,
    scale,
    heads,
    latent_stride,
    latent_head_stride,
    rope_stride,
    rope_head_stride,
    table_stride,
    splits,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One split of one sequence, 16 heads: running softmax over its tokens."""
    sequence = tl.program_id(0)
    split = tl.program_id(2)
    head = tl.program_id(1) * 16 + tl.arange(0, 16)
    latent = tl.arange(0, RANK)
    rope = tl.arange(0, ROPE)
    width: tl.constexpr = RANK + ROPE

    length = tl.load(context_lens + sequence)
    blocks = tl.cdiv(length, TOKENS)
    share = tl.cdiv(blocks, splits)
    first, last = split * share, tl.minimum((split + 1) * share, blocks)

    row = sequence.to(tl.int64)
    known = head[:, None] < heads
    latents = query_latent + row * latent_stride + head[:, None] * latent_head_stride
    ropes = query_rope + row * rope_stride + head[:, None] * rope_head_stride
    q_latent = tl.load(latents + latent[None, :], mask=known, other=0.0)
    q_rope = tl.load(ropes + rope[None, :], mask=known, other=0.0)

    maximum = tl.full((16,), float("-inf"), tl.float32)
    total = tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, RANK), tl.float32)
    for block in range(first, last):
        token = block * TOKENS + tl.arange(0, TOKENS)
        page = tl.load(block_table + sequence * table_stride + block * TOKENS // PAGE).to(tl.int64)
        base = kv_cache + (page * PAGE + (token % PAGE)[:, None]) * width
        used = token < length
        keys = tl.load(base + latent[None, :], mask=used[:, None], other=0.0)
        keys_rope = tl.load(base + RANK + rope[None, :], mask=used[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(keys), input_precision="ieee")
        scores += tl.dot(q_rope, tl.trans(keys_rope), input_precision="ieee")
        scores = tl.where(used[None, :], scores * scale, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp(scores - new_maximum[:, None])
        shrink = tl.exp(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(keys.dtype), keys, input_precision="ieee")
        maximum = new_maximum

    cell = (sequence * heads + head).to(tl.int64) * splits + split
    tl.store(partial + cell[:, None] * RANK + latent[None, :], acc, mask=head[:, None] < heads)
    tl.store(stats + cell * 2, maximum, mask=head < heads)
    tl.store(stats + cell * 2 + 1, total, mask=head < heads)


@triton.jit
def _combine(partial, stats, out, splits, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """The splits of one head of one sequence, weighed by their maxima; zeros where no token was seen."""
    cell = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, WIDTH)
    present = split < splits
    maxima = tl.load(stats + (cell * splits + split) * 2, mask=present, other=float("-inf"))
    totals = tl.load(stats + (cell * splits + split) * 2 + 1, mask=present, other=0.0)
    maximum = tl.max(maxima, 0)
    # Without any token the maximum is -inf, and -inf less -inf no number.
    weights = tl.exp(maxima - tl.where(maximum == float("-inf"), 0.0, maximum))
    denominator = tl.sum(weights * totals, 0)
    parts = tl.load(
        partial + (cell * splits + split)[:, None] * WIDTH + channel[None, :], mask=present[:, None], other=0.0
    )
    summed = tl.sum(tl.where(weights[:, None] > 0, parts, 0.0) * weights[:, None], 0)
    result = tl.where(denominator > 0, summed / tl.where(denominator > 0, denominator, 1.0), 0.0)
    tl.store(out + cell * WIDTH + channel, result.to(out.dtype.element_ty))
