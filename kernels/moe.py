"""The experts' MLPs over routed tokens: each token goes through its k experts, and the weighted results are summed.

    out[t] = sum_k w[t, k] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),   e = expert_ids[t, k]

hidden [T, H]; gate_up [E, 2I, H], the gate rows first; down [E, H, I]; expert_ids int64 [T, k];
weights float32 [T, k]. Shared experts are the last of E, chosen by every token with weight 1.
Cost: 6 * T * k * H * I operations, and each chosen expert's 3 * H * I weights read once: bound by
bandwidth below some hundred tokens an expert, by arithmetic above.

Three forms. The reference runs one expert after the other. Many tokens take two grouped matrix products over
rows sorted by expert, with Triton for what stands between and after them. Few tokens (decode) take Triton launches
over a table that lists, for every expert, its (token, choice) pairs: gate, up and SiLU in one; down; the weighted
sum. A program reads a tile of one expert's weights once for up to ROWS of its pairs. Products with the float32
weights are summed in float32 and cast back once, as in the reference.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import silu_mul, silu_mul_reference
from kernels.lang import tl, triton, use_triton

FEW_TOKENS = 512
"""Up to this many tokens the Triton form is used."""


def moe_experts(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """[T, H] in hidden's dtype; shapes as in this file's head."""
    if use_triton(hidden) and len(hidden) <= FEW_TOKENS:
        return moe_experts_triton(hidden, gate_up, down, expert_ids, weights)
    if use_triton(hidden) and hidden.dtype == torch.bfloat16:
        return _moe_grouped(hidden, gate_up, down, expert_ids, weights)
    return moe_experts_reference(hidden, gate_up, down, expert_ids, weights)


def moe_experts_reference(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """One expert after the other, any device and dtype."""
    order, rows, counts = _sort_by_expert(expert_ids, len(gate_up))
    blocks = hidden[rows].split(counts.tolist())
    outputs = [_mlp(block, gate_up[e], down[e]) for e, block in enumerate(blocks) if len(block)]
    unsorted = torch.empty(len(order), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    unsorted.index_copy_(0, order, torch.cat(outputs))
    wide = unsorted.unflatten(0, weights.shape).to(weights.dtype)
    return torch.einsum("tkh,tk->th", wide, weights).to(hidden.dtype)


def _moe_grouped(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """All experts in two grouped matrix products, without a trip to the host."""
    order, rows, counts = _sort_by_expert(expert_ids, len(gate_up))
    ends = counts.cumsum(0).to(torch.int32)
    activated = silu_mul(F.grouped_mm(hidden[rows], gate_up.transpose(1, 2), offs=ends))
    outputs = F.grouped_mm(activated, down.transpose(1, 2), offs=ends)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return weighted_sum_triton(outputs, weights, places)


def _sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [T * k] of the flat choices by expert, token of each, number of rows of each expert)."""
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return order, order // expert_ids.shape[1], counts


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return F.linear(silu_mul_reference(F.linear(x, gate_up)), down)


def weighted_sum_triton(outputs: Tensor, weights: Tensor, places: Tensor | None = None) -> Tensor:
    """[T, H]: the sum of each token's k rows of outputs [T * k, H], by weights float32 [T, k].

    places int64 [T * k]: the row of each (token, choice); None: they lie in that order.
    """
    (tokens, topk), width = weights.shape, outputs.shape[1]
    out = torch.empty(tokens, width, dtype=outputs.dtype, device=outputs.device)
    _weighted_sum[(tokens, triton.cdiv(width, 1024))](
        outputs,
        weights,
        outputs if places is None else places,
        out,
        width,
        TOPK=topk,
        PLACED=places is not None,
        BLOCK=1024,
        num_warps=4,
    )
    return out


@dataclass(frozen=True)
class Tiles:
    """Tile shape of one of the two products."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def default_tiles(tokens: int) -> tuple[Tiles, Tiles]:
    """(gate and up, down) for this many tokens: few rows while an expert sees few, long strips of its weights."""
    if tokens <= 32:
        return Tiles(16, 32, 128, 4, 4), Tiles(16, 32, 128, 4, 4)
    rows = 16 if tokens <= 128 else 32
    return Tiles(rows, 64, 64, 4, 4), Tiles(rows, 128, 64, 4, 4)


def moe_experts_triton(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    tiles: tuple[Tiles, Tiles] | None = None,
) -> Tensor:
    first, second = tiles or default_tiles(len(hidden))
    (tokens, width), (experts, inner) = hidden.shape, (len(gate_up), down.shape[2])
    topk = expert_ids.shape[1]
    pairs = tokens * topk
    device, dtype = hidden.device, hidden.dtype
    counts = torch.zeros(experts, dtype=torch.int32, device=device)
    table = torch.empty(experts, pairs, dtype=torch.int32, device=device)
    _list_pairs[(triton.cdiv(pairs, 256),)](expert_ids, counts, table, pairs, table.stride(0), BLOCK=256, num_warps=4)
    activated = torch.empty(pairs, inner, dtype=dtype, device=device)
    outputs = torch.empty(pairs, width, dtype=dtype, device=device)
    slots = triton.next_power_of_2(experts)
    for tile, x, w, y, out_width, in_width, gated in (
        (first, hidden, gate_up, activated, inner, width, True),
        (second, activated, down, outputs, width, inner, False),
    ):
        blocks = min(experts, pairs) + pairs // tile.rows
        _product[(triton.cdiv(out_width, tile.columns), blocks)](
            x,
            w,
            y,
            counts,
            table,
            experts,
            out_width,
            in_width,
            table.stride(0),
            topk if gated else 1,
            GATED=gated,
            SLOTS=slots,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return weighted_sum_triton(outputs, weights)


@triton.jit
def _list_pairs(expert_ids, counts, table, pairs, table_stride, BLOCK: tl.constexpr):
    """Enter every (token, choice) pair in its expert's row of the table; their order there changes no result."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = pair < pairs
    expert = tl.load(expert_ids + pair, mask=present, other=0)
    place = tl.atomic_add(counts + expert, 1, mask=present)
    tl.store(table + expert * table_stride + place, pair, mask=present)


@triton.jit
def _product(
    x,
    weight,
    y,
    counts,
    table,
    experts,
    out_width,
    in_width,
    table_stride,
    pairs_per_row,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y[pair] = weight[e] x[pair // pairs_per_row], or silu(gate) * up of it, for ROWS pairs of one expert."""
    slot = tl.arange(0, SLOTS)
    count = tl.load(counts + slot, mask=slot < experts, other=0)
    ends = tl.cumsum(tl.cdiv(count, ROWS), 0)
    block = tl.program_id(1)
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    if expert >= SLOTS:
        return
    here = slot == expert
    rows = tl.sum(tl.where(here, count, 0), 0)
    block -= tl.sum(tl.where(here, ends - tl.cdiv(count, ROWS), 0), 0)

    row = block * ROWS + tl.arange(0, ROWS)
    present = row < rows
    pair = tl.load(table + expert.to(tl.int64) * table_stride + row, mask=present, other=0)
    source = x + (pair // pairs_per_row).to(tl.int64)[:, None] * in_width
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    wanted = column < out_width
    expert_rows = expert.to(tl.int64) * (out_width * 2 if GATED else out_width)
    matrix = weight + (expert_rows + column)[None, :] * in_width
    upper = matrix + tl.cast(out_width, tl.int64) * in_width

    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc_up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, in_width, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        within = depth < in_width
        a = tl.load(source + depth[None, :], mask=present[:, None] & within[None, :], other=0.0)
        b = tl.load(matrix + depth[:, None], mask=within[:, None] & wanted[None, :], other=0.0)
        acc += tl.dot(a, b, input_precision="ieee")
        if GATED:
            c = tl.load(upper + depth[:, None], mask=within[:, None] & wanted[None, :], other=0.0)
            acc_up += tl.dot(a, c, input_precision="ieee")
    if GATED:
        gate = acc.to(x.dtype.element_ty).to(tl.float32)
        activated = (gate / (1 + tl.exp(-gate))).to(x.dtype.element_ty).to(tl.float32)
        acc = activated * acc_up.to(x.dtype.element_ty).to(tl.float32)
    target = y + pair.to(tl.int64)[:, None] * out_width + column[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=present[:, None] & wanted[None, :])


@triton.jit
def _weighted_sum(outputs, weights, places, out, width, TOPK: tl.constexpr, PLACED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOPK):
        pair = token * TOPK + choice
        row = tl.load(places + pair) if PLACED else pair
        acc += tl.load(outputs + row * width + column, mask=used, other=0.0).to(tl.float32) * tl.load(weights + pair)
    tl.store(out + token * width + column, acc.to(out.dtype.element_ty), mask=used)
