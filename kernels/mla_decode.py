"""Decode attention of MLA in absorbed form: one query a sequence over its latent pages (DeepSeek-V2, section 2.1).

With W_UK folded into the query and W_UV onto the output, all heads share one key and value: a cache
row is key (latent and rotated part, rank + rope wide), its first `rank` values are the value too:

    out[b, h] = sum_j softmax_j(scale * query[b, h] . row[j]) row[j, :rank]

The query comes in its two parts, query_latent [B, heads, rank] and query_rope [B, heads, rope], each with
strides of its own; kv_cache [pages, PAGE_SIZE, rank + rope], block_table [B, P] and context_lens [B] of any
integer type. Cost: each cached row read once (1152 bytes at full size in bfloat16) and
4 * heads * (rank + rope / 2) operations on it; bound by bandwidth up to some hundred heads.
A row with context_lens 0 gives zeros.

The Triton form is split-KV flash decoding (kernels/split_kv.py). Both of its products,

    scores = query rows^T        acc += weights rows[:, :rank]

have the heads as their rows, 16 or 32, which is what one instruction of the matrix units takes (not Hopper's widest,
which wants 64), and read the cache rows from shared memory, where asynchronous copies put the blocks to come while this
one is multiplied. A block of 32 tokens is 36 KiB: two programs with two blocks each keep 74 KB in flight on each
multiprocessor, more than the 20 KB that its share of the bandwidth needs at a latency of 1000 cycles.
"""

import torch
from torch import Tensor

from kernels.expect import FLOATS, INTEGERS, expect, expect_rows
from kernels.lang import pdl, tl, triton, use_triton
from kernels.paged_blocks import mla_decode_blocks
from kernels.split_kv import LENGTHS, LOG2_E, combine_pieces, empty_pieces, find_run, num_programs
from kernels.tiles import DecodeForm, decode_plan_for


def mla_decode(
    query_latent: Tensor,
    query_rope: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    batch_invariant: bool = False,
) -> Tensor:
    """[B, heads, rank] in the query's dtype; shapes as in this file's head.

    `batch_invariant`: a row is the same to the bit whatever the other rows; a CPU always computes it so. Raises
    ValueError for shapes that CUDA cannot serve so.
    """
    rows = (query_latent, query_rope, kv_cache, block_table, context_lens)
    if use_triton(query_latent) and _fits_triton(query_latent, query_rope):
        return mla_decode_triton(*rows, scale=scale, whole=batch_invariant)
    if batch_invariant and query_latent.is_cuda:
        raise ValueError(f"no batch-invariant attention for latents of {tuple(query_latent.shape)} on this device")
    return (mla_decode_blocks if query_latent.device.type == "cpu" else mla_decode_reference)(*rows, scale=scale)


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
    form: DecodeForm | None = None,
    whole: bool = False,
) -> Tensor:
    """As `mla_decode`. whole: a program for each sequence, in the form that serves any number of them."""
    (batch, heads, rank), rope = query_latent.shape, query_rope.shape[-1]
    page = kv_cache.shape[1]
    plan = decode_plan_for(query_latent, rope)
    form = form or (plan.steps[-1].form if whole else plan.form(batch))
    if page % form.tokens:
        raise ValueError(f"a page of {page} tokens is no multiple of {form.tokens}")
    device, dtype = query_latent.device, query_latent.dtype
    expect_rows("query_latent", query_latent, (batch, heads, rank), *FLOATS)
    expect_rows("query_rope", query_rope, (batch, heads, rope), dtype)
    expect("kv_cache", kv_cache, (len(kv_cache), page, rank + rope), dtype)
    expect_rows("block_table", block_table, (batch, block_table.shape[1]), *INTEGERS)
    expect("context_lens", context_lens, (batch,), *INTEGERS)
    groups = triton.cdiv(heads, form.heads)
    most = batch * block_table.shape[1] * (page // form.tokens)
    programs = batch if whole else num_programs(device, most, form.programs / groups)
    pieces = empty_pieces(1 if whole else programs + batch, heads, rank, device)
    out = torch.empty(batch, heads, rank, dtype=dtype, device=device)
    _attend[(groups, programs)](
        kv_cache,
        query_latent,
        query_rope,
        block_table,
        context_lens,
        out,
        pieces.accumulators,
        pieces.maxima,
        pieces.sums,
        scale * LOG2_E,
        batch,
        heads,
        query_latent.stride(0),
        query_latent.stride(1),
        query_rope.stride(0),
        query_rope.stride(1),
        block_table.stride(0),
        RANK=rank,
        ROPE=rope,
        PAGE=page,
        TOKENS=form.tokens,
        HEADS=form.heads,
        STAGES=form.stages,
        LENS=LENGTHS,
        WHOLE=whole,
        num_warps=form.warps,
        **pdl(query_latent),
    )
    combine_pieces(pieces, context_lens, out, programs=1 if whole else programs, tokens=form.tokens)
    return out


def _fits_triton(query_latent: Tensor, query_rope: Tensor) -> bool:
    """Blocks are whole latents and rope parts, whose widths must be powers of two and no less than a dot's 16."""
    widths = (query_latent.shape[-1], query_rope.shape[-1])
    dense = query_latent.stride(-1) == query_rope.stride(-1) == 1
    return dense and all(width >= 16 and width & (width - 1) == 0 for width in widths)


@triton.jit
def _attend(
    kv_cache,
    query_latent,
    query_rope,
    block_table,
    context_lens,
    out,
    accumulators,
    maxima,
    sums,
    scale,
    batch,
    heads,
    latent_stride,
    latent_head_stride,
    rope_stride,
    rope_head_stride,
    table_stride,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    LENS: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's run of blocks, HEADS heads: for each sequence in it a running softmax over its tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(1)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    known = head < heads
    channel = tl.arange(0, RANK)
    part = tl.arange(0, ROPE)
    place = tl.arange(0, TOKENS)
    width: tl.constexpr = RANK + ROPE
    row_offsets = place[:, None] * width

    first, last, sequence, before = find_run(program, tl.num_programs(1), context_lens, batch, TOKENS, LENS, WHOLE)
    while (before < last) & (first < last):
        length = tl.load(context_lens + sequence).to(tl.int32)
        blocks = tl.cdiv(length, TOKENS)
        begin = tl.maximum(first - before, 0)
        end = tl.minimum(blocks, last - before)
        row = sequence.to(tl.int64)
        if begin < end:
            latent_queries = query_latent + row * latent_stride + head[:, None] * latent_head_stride
            rope_queries = query_rope + row * rope_stride + head[:, None] * rope_head_stride
            q_latent = tl.load(latent_queries + channel[None, :], mask=known[:, None], other=0.0)
            q_rope = tl.load(rope_queries + part[None, :], mask=known[:, None], other=0.0)
            table = block_table + row * table_stride

            maximum = tl.full((HEADS,), float("-inf"), tl.float32)
            # Summed over a block's tokens only at the end, as that takes a barrier of all warps.
            sum = tl.zeros((HEADS, TOKENS), tl.float32)
            acc = tl.zeros((HEADS, RANK), tl.float32)
            for block in tl.range(begin, end, num_stages=STAGES):
                slot = tl.load(table + block * TOKENS // PAGE).to(tl.int64) * PAGE + block * TOKENS % PAGE
                rows = kv_cache + slot * width
                # What lies behind a sequence in its last page may be no number, which a weight of zero would not hide.
                used = block * TOKENS + place < length
                keys = tl.load(rows + row_offsets + channel[None, :], mask=used[:, None], other=0.0)
                keys_rope = tl.load(rows + row_offsets + RANK + part[None, :], mask=used[:, None], other=0.0)
                scores = tl.dot(q_rope, tl.trans(keys_rope), input_precision="ieee")
                scores = tl.dot(q_latent, tl.trans(keys), scores, input_precision="ieee")
                scores = tl.where(used[None, :], scores * scale, float("-inf"))
                new_maximum = tl.maximum(maximum, tl.max(scores, 1))
                weights = tl.exp2(scores - new_maximum[:, None])
                shrink = tl.exp2(maximum - new_maximum)[:, None]
                acc = tl.dot(weights.to(keys.dtype), keys, acc * shrink, input_precision="ieee")
                sum = sum * shrink + weights
                maximum = new_maximum

            total = tl.sum(sum, 1)
            if end - begin == blocks:
                target = out + (row * heads + head)[:, None] * RANK + channel[None, :]
                tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=known[:, None])
            else:
                cell = (program + row) * heads + head
                tl.store(accumulators + cell[:, None] * RANK + channel[None, :], acc, mask=known[:, None])
                tl.store(maxima + cell, maximum, mask=known)
                tl.store(sums + cell, total, mask=known)
        before += blocks
        sequence += 1
