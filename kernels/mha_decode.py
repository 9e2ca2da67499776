"""Decode attention over head pages (tiny): one query a sequence, keys and values kept per head.

    out[b, h] = sum_j softmax_j(scale * query[b, h] . key[j, h]) value[j, h]

query [B, heads, dim]; kv_cache [pages, PAGE_SIZE, 2 * heads * dim], a row holding all keys and then all
values; block_table [B, P] and context_lens [B] of any integer type. Cost: each cached row read once; bound by
bandwidth. A row with context_lens 0 gives zeros.

The Triton form is split-KV flash decoding (kernels/split_kv.py), with programs of their own for each head: with one
query a key there is no product for the matrix units.
"""

import torch
from torch import Tensor

from kernels.expect import FLOATS, INTEGERS, expect, expect_rows
from kernels.lang import pdl, tl, triton, use_triton
from kernels.paged_blocks import mha_decode_blocks
from kernels.split_kv import LENGTHS, LOG2_E, combine_pieces, empty_pieces, find_run, num_programs

TOKENS = 32
"""Tokens that a program looks at together: half a page, so that no block crosses pages."""
_RESIDENT = 8
"""Programs that a multiprocessor holds at a time."""
STAGES = 3
"""Blocks of tokens on their way or in use at a time."""


def mha_decode(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    batch_invariant: bool = False,
) -> Tensor:
    """[B, heads, dim] in query's dtype; shapes as in this file's head.

    `batch_invariant`: a row is the same to the bit whatever the other rows; a CPU always computes it so. Raises
    ValueError for shapes that CUDA cannot serve so.
    """
    rows = (query, kv_cache, block_table, context_lens)
    if use_triton(query) and query.shape[2] & (query.shape[2] - 1) == 0 and query.stride(2) == 1:
        return mha_decode_triton(*rows, scale=scale, whole=batch_invariant)
    if batch_invariant and query.is_cuda:
        raise ValueError(f"no batch-invariant attention for queries of {tuple(query.shape)} on this device")
    return (mha_decode_blocks if query.device.type == "cpu" else mha_decode_reference)(*rows, scale=scale)


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
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    stages: int = STAGES,
    resident: int = _RESIDENT,
    whole: bool = False,
) -> Tensor:
    """As `mha_decode`.

    stages: blocks on their way or in use at a time; resident: programs of a multiprocessor; whole: a program for each
    sequence and head.
    """
    (batch, heads, dim), page = query.shape, kv_cache.shape[1]
    if page % TOKENS:
        raise ValueError(f"a page of {page} tokens is no multiple of {TOKENS}")
    expect_rows("query", query, (batch, heads, dim), *FLOATS)
    expect("kv_cache", kv_cache, (len(kv_cache), page, 2 * heads * dim), query.dtype)
    expect_rows("block_table", block_table, (batch, block_table.shape[1]), *INTEGERS)
    expect("context_lens", context_lens, (batch,), *INTEGERS)
    most = batch * block_table.shape[1] * (page // TOKENS)
    programs = batch if whole else num_programs(query.device, most, resident / heads)
    pieces = empty_pieces(1 if whole else programs + batch, heads, dim, query.device)
    out = torch.empty(batch, heads, dim, dtype=query.dtype, device=query.device)
    _attend_head[(heads, programs)](
        query,
        kv_cache,
        block_table,
        context_lens,
        out,
        pieces.accumulators,
        pieces.maxima,
        pieces.sums,
        scale * LOG2_E,
        batch,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        DIM=dim,
        PAGE=page,
        TOKENS=TOKENS,
        LENS=LENGTHS,
        STAGES=stages,
        WHOLE=whole,
        num_warps=4,
        **pdl(query),
    )
    combine_pieces(pieces, context_lens, out, programs=1 if whole else programs, tokens=TOKENS)
    return out


@triton.jit
def _attend_head(
    query,
    kv_cache,
    block_table,
    context_lens,
    out,
    accumulators,
    maxima,
    sums,
    scale,
    batch,
    query_stride,
    head_stride,
    table_stride,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    LENS: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's run of blocks, one head: for each sequence in it a running softmax over its tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    program = tl.program_id(1)
    channel = tl.arange(0, DIM)
    place = tl.arange(0, TOKENS)
    width = 2 * heads * DIM

    first, last, sequence, before = find_run(program, tl.num_programs(1), context_lens, batch, TOKENS, LENS, WHOLE)
    while (before < last) & (first < last):
        length = tl.load(context_lens + sequence).to(tl.int32)
        blocks = tl.cdiv(length, TOKENS)
        begin = tl.maximum(first - before, 0)
        end = tl.minimum(blocks, last - before)
        row = sequence.to(tl.int64)
        if begin < end:
            q = tl.load(query + row * query_stride + head * head_stride + channel).to(tl.float32) * scale
            table = block_table + row * table_stride
            maximum = float("-inf")
            sum = 0.0
            acc = tl.zeros((DIM,), tl.float32)
            for block in tl.range(begin, end, num_stages=STAGES):
                page = tl.load(table + block * TOKENS // PAGE).to(tl.int64)
                rows = kv_cache + (page * PAGE + block * TOKENS % PAGE + place)[:, None] * width + head * DIM
                used = block * TOKENS + place < length
                keys = tl.load(rows + channel[None, :], mask=used[:, None], other=0.0).to(tl.float32)
                values = tl.load(rows + heads * DIM + channel[None, :], mask=used[:, None], other=0.0).to(tl.float32)
                scores = tl.where(used, tl.sum(keys * q[None, :], 1), float("-inf"))
                new_maximum = tl.maximum(maximum, tl.max(scores, 0))
                weights = tl.exp2(scores - new_maximum)
                shrink = tl.exp2(maximum - new_maximum)
                sum = sum * shrink + tl.sum(weights, 0)
                acc = acc * shrink + tl.sum(values * weights[:, None], 0)
                maximum = new_maximum

            if end - begin == blocks:
                target = out + (row * heads + head) * DIM + channel
                tl.store(target, (acc / sum).to(out.dtype.element_ty))
            else:
                cell = (program + row) * heads + head
                tl.store(accumulators + cell * DIM + channel, acc)
                tl.store(maxima + cell, maximum)
                tl.store(sums + cell, sum)
        before += blocks
        sequence += 1
