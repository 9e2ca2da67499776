"""The experts' two matrix products over (token, choice) pairs sorted by expert, and that sort.

    order    the pairs p = t * k + choice by rising expert_ids[p], in their own order within an expert
    starts   of each expert's pairs in that order; starts[experts] is their number
    first:   activated[r] = silu(gate[e] x[t]) * up[e] x[t]        r a place in the order, e and t of the pair there
    second:  outputs[p] = down[e] activated[r]                     p the pair at r

The first product gathers the tokens' rows as it loads them and ends with silu; the second puts its rows back in the
pairs' order. A tile is ROWS pairs of one expert by COLUMNS of its outputs (of gate and of up in the first); every
expert's last row block may be partly empty. Programs share the tiles out: how many there are depends on the routing,
which the host does not know. Rows are reached by 64-bit offsets, what lies within one expert's matrix by 32-bit ones.
Cost: 2 * pairs * rows * columns operations a product; each chosen expert's weights read once as long as the row
blocks of an expert run side by side (`Tiles.group`).
"""

import torch
from torch import Tensor

from kernels.lang import pdl, tl, triton
from kernels.tiles import Tiles

_INTERPRETED_PROCESSORS = 2
"""Multiprocessors to assume where there is no GPU: few, so that tests see programs that take several tiles."""


def sort_by_expert(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order int32 [T * k], starts int32 [experts + 1]) of expert_ids int64 [T, k]; see this file's head."""
    pairs = expert_ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=expert_ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=expert_ids.device)
    block = min(max(triton.next_power_of_2(pairs), 128), 8192)
    warps = min(max(block // 512, 4), 16)
    _sort_by_expert[(experts,)](
        expert_ids, order, starts, pairs, experts, BLOCK=block, num_warps=warps, **pdl(expert_ids)
    )
    return order, starts


def product(
    x: Tensor, weight: Tensor, order: Tensor, starts: Tensor, topk: int, tiles: Tiles, *, gated: bool
) -> Tensor:
    """[pairs, out]: the first product (gated) of x [T, in] and weight [experts, 2 * out, in], in the sorted order;
    or the second, of x [pairs, in] in the sorted order and weight [experts, out, in], in the pairs' order."""
    (experts, out_width, in_width), pairs = weight.shape, len(order)
    if gated:
        out_width //= 2
    y = torch.empty(pairs, out_width, dtype=x.dtype, device=x.device)
    blocks = min(experts, pairs) + pairs // tiles.rows
    programs = min(blocks * triton.cdiv(out_width, tiles.columns), tiles.programs * _processors(x.device))
    _product[(programs,)](
        x,
        weight,
        y,
        order,
        starts,
        experts,
        in_width,
        out_width,
        TOPK=topk,
        GATED=gated,
        SLOTS=triton.next_power_of_2(experts),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        GROUP=tiles.group,
        AHEAD=tiles.ahead,
        EVEN=in_width % tiles.depth == 0,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **pdl(x),
    )
    return y


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _sort_by_expert(expert_ids, order, starts, pairs, experts, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One expert's part of the order: it begins after all pairs of lower experts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        ids = tl.load(expert_ids + first + place, mask=first + place < pairs, other=experts)
        lower += (ids < expert).to(tl.int32)
    start = tl.sum(lower, 0)
    tl.store(starts + expert, start)
    for first in range(0, pairs, BLOCK):
        ids = tl.load(expert_ids + first + place, mask=first + place < pairs, other=experts)
        mine = (ids == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(mine, 0) - 1, first + place, mask=mine != 0)
        start += tl.sum(mine, 0)
    if expert == experts - 1:
        tl.store(starts + experts, start)


@triton.jit
def _product(
    x,
    weight,
    y,
    order,
    starts,
    experts,
    in_width,
    out_width,
    TOPK: tl.constexpr,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.arange(0, SLOTS)
    start = tl.load(starts + slot, mask=slot < experts, other=0)
    end = tl.load(starts + slot + 1, mask=slot < experts, other=0)
    blocks = tl.cdiv(end - start, ROWS)
    ends = tl.cumsum(blocks, 0)
    total = tl.max(ends, 0)
    column_tiles = tl.cdiv(out_width, COLUMNS)
    for tile in tl.range(tl.program_id(0), total * column_tiles, tl.num_programs(0), flatten=AHEAD):
        # GROUP row blocks by all columns, the row blocks side by side.
        group = tile // (GROUP * column_tiles)
        within_group = tile - group * GROUP * column_tiles
        height = tl.minimum(total - group * GROUP, GROUP)
        # From the last expert on: the shared ones, which have most rows, and whose weights may lie in the cache already
        # (kernels/prefetch.py).
        block = total - 1 - group * GROUP - within_group % height
        column = within_group // height * COLUMNS + tl.arange(0, COLUMNS)

        expert = tl.sum((ends <= block).to(tl.int32), 0)
        here = slot == expert
        block -= tl.sum(tl.where(here, ends - blocks, 0), 0)
        row = tl.sum(tl.where(here, start, 0), 0) + block * ROWS + tl.arange(0, ROWS)
        present = row < tl.sum(tl.where(here, end, 0), 0)
        pair = tl.load(order + row, mask=present, other=0)
        if GATED:
            source = pair // TOPK
            target = row
        else:
            source = row
            target = pair

        depth = tl.arange(0, DEPTH)
        x_rows = x + source.to(tl.int64)[:, None] * in_width
        matrix = weight + expert.to(tl.int64) * in_width * (2 * out_width if GATED else out_width)
        rows = tl.minimum(column, out_width - 1)[None, :] * in_width
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        acc_up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, in_width, DEPTH):
            at = first + depth
            within = (at < in_width) | EVEN
            a = tl.load(x_rows + at[None, :], mask=present[:, None] & within[None, :], other=0.0)
            b = tl.load(matrix + (rows + at[:, None]), mask=within[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            if GATED:
                c = tl.load(matrix + out_width * in_width + (rows + at[:, None]), mask=within[:, None], other=0.0)
                acc_up = tl.dot(a, c, acc_up, input_precision="ieee")
        if GATED:
            # Rounded where the reference rounds: after each product and after silu.
            dtype: tl.constexpr = y.dtype.element_ty
            gate = acc.to(dtype).to(tl.float32)
            silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
            acc = silu * acc_up.to(dtype).to(tl.float32)
        targets = y + target.to(tl.int64)[:, None] * out_width + column[None, :]
        tl.store(targets, acc.to(y.dtype.element_ty), mask=present[:, None] & (column < out_width)[None, :])
