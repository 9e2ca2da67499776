"""The experts' MLPs over routed tokens: each token goes through its k experts, and the weighted results are summed.

    out[t] = sum_k w[t, k] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),   e = expert_ids[t, k]

hidden [T, H]; gate_up [E, 2I, H], the gate rows first; down [E, H, I]; expert_ids int64 [T, k];
weights float32 [T, k]. Shared experts are the last of E, chosen by every token with weight 1.
Cost: 6 * T * k * H * I operations, and each chosen expert's 3 * H * I weights read once: bound by
bandwidth below some hundred tokens an expert, by arithmetic above.

Three forms. The reference runs one expert after the other. Triton takes a handful of tokens through strips of
weights in registers (kernels/moe_strips.py), and any number by two products over pairs sorted by expert
(kernels/moe_products.py) and the weighted sum here: four launches, and no trip to the host. A plan
(kernels/tiles.py) says which, and with which tile shapes. Products with the float32 weights are summed in float32 and
cast back once, as in the reference.
"""

import torch
from torch import Tensor

from kernels.activation import silu_mul_reference
from kernels.batch_invariant import linear
from kernels.expect import FLOATS, expect
from kernels.lang import pdl, tl, triton, use_triton
from kernels.moe_products import product, sort_by_expert
from kernels.moe_strips import experts_by_strips
from kernels.tiles import ExpertsPlan, StripStep, default_plan


def moe_experts(
    hidden: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    plan: ExpertsPlan | None = None,
) -> Tensor:
    """[T, H] in hidden's dtype; shapes as in this file's head. The plan is for Triton; None: the default one."""
    if use_triton(hidden):
        return moe_experts_triton(hidden, gate_up, down, expert_ids, weights, plan or default_plan(hidden.dtype))
    return moe_experts_reference(hidden, gate_up, down, expert_ids, weights)


def moe_experts_triton(
    hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor, plan: ExpertsPlan
) -> Tensor:
    """Raises ValueError for what the kernels cannot serve."""
    _check(hidden, gate_up, down, expert_ids, weights)
    if not len(hidden):
        return torch.empty_like(hidden)
    step = plan.step(len(hidden))
    if isinstance(step, StripStep):
        return experts_by_strips(hidden, gate_up, down, expert_ids, weights, step)
    order, starts = sort_by_expert(expert_ids, len(gate_up))
    topk = expert_ids.shape[1]
    activated = product(hidden, gate_up, order, starts, topk, step.gate_up, gated=True)
    outputs = product(activated, down, order, starts, topk, step.down, gated=False)
    return weighted_sum(outputs, weights)


def _check(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
    (tokens, width), (experts, doubled, _) = hidden.shape, gate_up.shape
    inner = doubled // 2
    expect("hidden", hidden, (tokens, width), *FLOATS)
    expect("gate_up", gate_up, (experts, 2 * inner, width), hidden.dtype)
    expect("down", down, (experts, width, inner), hidden.dtype)
    expect("expert_ids", expert_ids, (tokens, expert_ids.shape[-1]), torch.int64)
    expect("weights", weights, expert_ids.shape, torch.float32)


def moe_experts_reference(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """One expert after the other, any device and dtype."""
    order, rows, counts = _sort_by_expert(expert_ids, len(gate_up))
    blocks = hidden[rows].split(counts.tolist())
    outputs = [_mlp(block, gate_up[e], down[e]) for e, block in enumerate(blocks) if len(block)]
    unsorted = torch.empty(len(order), hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    unsorted.index_copy_(0, order, torch.cat(outputs))
    wide = unsorted.unflatten(0, weights.shape).to(weights.dtype)
    return torch.einsum("tkh,tk->th", wide, weights).to(hidden.dtype)


def _sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [T * k] of the flat choices by expert, token of each, number of rows of each expert)."""
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return order, order // expert_ids.shape[1], counts


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    return linear(silu_mul_reference(linear(x, gate_up)), down)


def weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """[T, H]: the sum of each token's k rows of outputs [T * k, H], in the order of weights float32 [T, k]."""
    (tokens, topk), width = weights.shape, outputs.shape[1]
    out = torch.empty(tokens, width, dtype=outputs.dtype, device=outputs.device)
    grid = (tokens, triton.cdiv(width, 1024))
    _weighted_sum[grid](outputs, weights, out, width, TOPK=topk, BLOCK=1024, num_warps=4, **pdl(outputs))
    return out


@triton.jit
def _weighted_sum(outputs, weights, out, width, TOPK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = column < width
    acc = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOPK):
        row = token * TOPK + choice
        acc += tl.load(outputs + row * width + column, mask=used, other=0.0).to(tl.float32) * tl.load(weights + row)
    tl.store(out + token * width + column, acc.to(out.dtype.element_ty), mask=used)
