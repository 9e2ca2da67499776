"""The experts' MLPs for a handful of tokens: every program holds a strip of one expert's weights in registers.

    activated[p] = silu(gate[e] x[t]) * up[e] x[t]            p = t * k + choice, e = expert_ids[p]
    out[t] = sum_choice weights[p] * down[e] activated[p]

Shapes as in kernels/moe.py. Two launches. In the first, the program of a pair's expert and some columns loads those
rows of gate and up once and takes every pair of that expert through them; the programs of later pairs of the same
expert have nothing to do. In the second, a program owns some columns of one token's output: it loads the rows of all
the token's experts and sums over everything at once, in float32. Programs of tokens that share experts run side by
side, so that memory is read once and the cache serves the rest.
Cost: 3 * H * I weights of each chosen expert read once: bound by bandwidth. All loads of a program are in flight
together, 20 to 40 KB, and several programs share a multiprocessor.
"""

import torch
from torch import Tensor

from kernels.lang import pdl, tl, triton
from kernels.tiles import MOST_STRIP_PAIRS, StripStep


def experts_by_strips(
    hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor, step: StripStep
) -> Tensor:
    (tokens, width), inner = hidden.shape, down.shape[2]
    pairs, topk = expert_ids.numel(), expert_ids.shape[1]
    if pairs > MOST_STRIP_PAIRS:
        raise ValueError(f"strips serve up to {MOST_STRIP_PAIRS} pairs of token and expert, got {pairs}")
    activated = torch.empty(pairs, inner, dtype=hidden.dtype, device=hidden.device)
    first, second = step.gate_up, step.down
    _gate_up_strips[(triton.cdiv(inner, first.columns), pairs)](
        hidden,
        gate_up,
        activated,
        expert_ids,
        pairs,
        width,
        inner,
        TOPK=topk,
        SLOTS=triton.next_power_of_2(pairs),
        COLUMNS=first.columns,
        DEPTH=triton.next_power_of_2(width),
        num_warps=first.warps,
        **pdl(hidden),
    )
    out = torch.empty_like(hidden)
    _down_strips[(tokens, triton.cdiv(width, second.columns))](
        activated,
        down,
        out,
        expert_ids,
        weights,
        inner,
        width,
        TOPK=topk,
        CHOICES=triton.next_power_of_2(topk),
        COLUMNS=second.columns,
        DEPTH=triton.next_power_of_2(inner),
        num_warps=second.warps,
        **pdl(hidden),
    )
    return out


@triton.jit
def _gate_up_strips(
    hidden,
    weight,
    activated,
    expert_ids,
    pairs,
    in_width,
    out_width,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """activated[pair, columns] for all pairs of the expert of the program's pair, if that is the first of them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Not before the wait: so the next kernel may read expert_ids at its start.
        tl.extra.cuda.gdc_launch_dependents()
    # The last choices first: shared experts, whose weights may lie in the cache already (kernels/prefetch.py).
    tokens = pairs // TOPK
    first = tl.program_id(1) % tokens * TOPK + TOPK - 1 - tl.program_id(1) // tokens
    slot = tl.arange(0, SLOTS)
    expert = tl.load(expert_ids + first)
    mine = tl.load(expert_ids + slot, mask=slot < pairs, other=-1) == expert
    pair = tl.min(tl.where(mine, slot, SLOTS), 0)
    if pair < first:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    within = depth < in_width
    rows = tl.minimum(column, out_width - 1)[:, None] * in_width + depth[None, :]
    gate_rows = weight + expert.to(tl.int64) * 2 * out_width * in_width
    up_rows = gate_rows + out_width * in_width
    gate = tl.load(gate_rows + rows, mask=within[None, :], other=0.0)
    up = tl.load(up_rows + rows, mask=within[None, :], other=0.0)
    while pair < SLOTS:
        x = tl.load(hidden + (pair // TOPK) * in_width + depth, mask=within, other=0.0).to(tl.float32)[None, :]
        # Rounded where the reference rounds: after each product and after silu.
        dtype: tl.constexpr = activated.dtype.element_ty
        z = tl.sum(gate.to(tl.float32) * x, 1).to(dtype).to(tl.float32)
        silu = (z / (1 + tl.exp(-z))).to(dtype).to(tl.float32)
        y = silu * tl.sum(up.to(tl.float32) * x, 1).to(dtype).to(tl.float32)
        tl.store(activated + pair * out_width + column, y.to(dtype), mask=column < out_width)
        pair = tl.min(tl.where(mine & (slot > pair), slot, SLOTS), 0)


@triton.jit
def _down_strips(
    activated,
    weight,
    out,
    expert_ids,
    weights,
    in_width,
    out_width,
    TOPK: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token, columns]: the sum over the token's experts. Weights are on their way before the activations exist."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    choice = tl.arange(0, CHOICES)
    chosen = choice < TOPK
    pair = token * TOPK + choice
    expert = tl.load(expert_ids + pair, mask=chosen, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    used = chosen[:, None] & (depth < in_width)[None, :]
    rows = tl.minimum(column, out_width - 1)[:, None] * in_width + depth[None, :]
    matrix = weight + expert * out_width * in_width
    w = tl.load(matrix[:, None, None] + rows[None, :, :], mask=used[:, None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(activated + pair[:, None] * in_width + depth[None, :], mask=used, other=0.0).to(tl.float32)
    x *= tl.load(weights + pair, mask=chosen, other=0.0)[:, None]
    y = tl.sum(tl.sum(w.to(tl.float32) * x[:, None, :], 0), 1)
    tl.store(out + token * out_width + column, y.to(out.dtype.element_ty), mask=column < out_width)
