"""The Triton kernel of prefill attention (kernels/prefill_attention.py has the mathematics): a running softmax.

A program has one head and ROWS queries of one sequence, and goes over the sequence's keys by COLUMNS. Blocks that all
of its queries see need no mask; the ones at the diagonal and at the end do, and come last. Programs with the last
queries of a sequence, which see most keys, start first.

A key is two parts side by side: one of every head, and, for MLA, one that all heads share, which is read as it lies in
the cache instead of being copied to every head. Scores are products of base-2 logarithms: one multiplication and one
exp2 a score. Cost: as there; bound by arithmetic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.lang import pdl, tl, triton
from kernels.split_kv import LOG2_E


@dataclass(frozen=True)
class Form:
    """How the kernel is compiled."""

    rows: int
    columns: int
    warps: int
    stages: int


HALF = Form(rows=128, columns=64, warps=8, stages=3)
_FLOAT = Form(rows=32, columns=32, warps=4, stages=1)
SEQUENCES = 64
"""Sequences among which a program looks for its own at a time."""


def fits_triton(query: Tensor, key: Tensor, value: Tensor, key_rope: Tensor | None) -> str | None:
    """Why the kernel cannot take these, None if it can: parts are whole blocks, hence powers of two, 16 at least."""
    widths = {"key": key.shape[-1], "value": value.shape[-1]}
    if key_rope is not None:
        widths["rotated key"] = key_rope.shape[-1]
    for name, width in widths.items():
        if width < 16 or width & (width - 1):
            return f"the {name}'s width {width} is no power of two from 16 on"
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value, *(() if key_rope is None else (key_rope,)))):
        return "the channels of a head do not lie side by side"
    return None


def prefill_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_rope: Tensor | None,
    *,
    query_lens: list[int] | None,
    cu_query_lens: Tensor,
    cu_key_lens: Tensor,
    scale: float,
    out: Tensor | None = None,
    form: Form | None = None,
) -> Tensor:
    """[T, heads, v_dim] in query's dtype, in `out` (contiguous) where given.

    query [T, heads, key_dim + rope_dim], key [S, heads, key_dim], value [S, heads, v_dim], key_rope [S, rope_dim] or
    None (rope_dim 0), with any strides but the last; lengths as in kernels/prefill_attention.py: without query_lens
    there are programs for any that T rows can have, and those without a query end at once.
    Raises ValueError for widths and strides that the kernel cannot take.
    """
    if (reason := fits_triton(query, key, value, key_rope)) is not None:
        raise ValueError(reason)
    form = form or (HALF if query.dtype.itemsize == 2 else _FLOAT)
    tokens, heads, _ = query.shape
    sequences = len(cu_query_lens) - 1
    if out is None:
        out = torch.empty(tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    if query_lens is None:
        tiles = tokens // form.rows + sequences  # each sequence has one tile at most that is not full
    else:
        tiles = sum(-(-length // form.rows) for length in query_lens)
    _prefill[(heads, tiles)](
        query,
        key,
        value,
        key if key_rope is None else key_rope,
        out,
        cu_query_lens,
        cu_key_lens,
        sequences,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        0 if key_rope is None else key_rope.stride(0),
        KEY=key.shape[-1],
        ROPE=0 if key_rope is None else key_rope.shape[-1],
        VALUE=value.shape[-1],
        ROWS=form.rows,
        COLUMNS=form.columns,
        STAGES=form.stages,
        SEQUENCES=SEQUENCES,
        num_warps=form.warps,
        num_stages=form.stages,
        **pdl(query),
    )
    return out


@triton.jit
def _prefill(
    query,
    key,
    value,
    key_rope,
    out,
    cu_query_lens,
    cu_key_lens,
    sequences,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_rope_stride,
    KEY: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    sequence, tile = _find_tile(tl.num_programs(1) - 1 - tl.program_id(1), cu_query_lens, sequences, ROWS, SEQUENCES)
    if sequence >= sequences:
        return
    query_start = tl.load(cu_query_lens + sequence).to(tl.int64)
    query_len = tl.load(cu_query_lens + sequence + 1).to(tl.int32) - query_start.to(tl.int32)
    key_start = tl.load(cu_key_lens + sequence).to(tl.int64)
    key_len = tl.load(cu_key_lens + sequence + 1).to(tl.int32) - key_start.to(tl.int32)

    row = tile * ROWS + tl.arange(0, ROWS)
    known = (row < query_len)[:, None]
    last_seen = row + key_len - query_len  # the last key that each query sees
    channel = tl.arange(0, KEY)
    of_value = tl.arange(0, VALUE)
    source = query + (query_start + row[:, None]) * query_stride + head * query_head_stride
    q = tl.load(source + channel[None, :], mask=known, other=0.0)
    keys = key + key_start * key_stride + head * key_head_stride + channel[None, :]
    values = value + key_start * value_stride + head * value_head_stride + of_value[None, :]
    if ROPE > 0:
        part = tl.arange(0, ROPE)
        q_rope = tl.load(source + KEY + part[None, :], mask=known, other=0.0)
        keys_rope = key_rope + key_start * key_rope_stride + part[None, :]

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE), tl.float32)
    first_masked = (tile * ROWS + key_len - query_len + 1) // COLUMNS * COLUMNS
    end = tl.minimum(key_len, (tile + 1) * ROWS + key_len - query_len)
    for start in tl.range(0, first_masked, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)[:, None]
        scores = tl.dot(q, tl.trans(tl.load(keys + column * key_stride)), input_precision="ieee")
        if ROPE > 0:
            k_rope = tl.load(keys_rope + column * key_rope_stride)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        v = tl.load(values + column * value_stride)
        maximum, sum, acc = _add_block(scores, v, scale, maximum, sum, acc)
    for start in tl.range(first_masked, end, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)[:, None]
        # Rows past the end are other sequences', or no memory of ours.
        present = column < key_len
        k = tl.load(keys + column * key_stride, mask=present, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROPE > 0:
            k_rope = tl.load(keys_rope + column * key_rope_stride, mask=present, other=0.0)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        v = tl.load(values + column * value_stride, mask=present, other=0.0)
        seen = (start + tl.arange(0, COLUMNS))[None, :] <= last_seen[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        maximum, sum, acc = _add_block(scores, v, scale, maximum, sum, acc)

    # Every query sees the first key at least, so that no sum is zero.
    target = out + ((query_start + row[:, None]) * tl.num_programs(0) + head) * VALUE + of_value[None, :]
    tl.store(target, (acc / sum[:, None]).to(out.dtype.element_ty), mask=known)


@triton.jit
def _find_tile(tile, cu_query_lens, sequences, ROWS: tl.constexpr, SEQUENCES: tl.constexpr):
    """(sequence, its tile) of a tile's number among those of all sequences, laid end to end; behind them all the
    sequence is `sequences`."""
    index = tl.arange(0, SEQUENCES)
    sequence = tile * 0
    seen = tile * 0
    before = tile * 0
    for start in range(0, sequences, SEQUENCES):
        present = start + index < sequences
        starts = tl.load(cu_query_lens + start + index, mask=present, other=0).to(tl.int32)
        ends = tl.load(cu_query_lens + start + index + 1, mask=present, other=0).to(tl.int32)
        tiles = (ends - starts + (ROWS - 1)) // ROWS
        passed = (seen + tl.cumsum(tiles, 0) <= tile) & present
        sequence += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, tiles, 0), 0)
        seen += tl.sum(tiles, 0)
    return sequence, tile - before


@triton.jit
def _add_block(scores, values, scale, maximum, sum, acc):
    """The running softmax over one block more; maximum is that of the scaled scores. All of [ROWS] or [ROWS, VALUE]."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new_maximum[:, None])
    shrink = tl.exp2(maximum - new_maximum)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return new_maximum, sum * shrink + tl.sum(weights, 1), acc
