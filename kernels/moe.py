"""The experts' MLPs over routed tokens: each token goes through its k experts, and the weighted results are summed.

    out[t] = sum_k w[t, k] * down[e] (silu(gate[e] x[t]) * up[e] x[t]),   e = expert_ids[t, k]

hidden [T, H]; gate_up [E, 2I, H], the gate rows first; down [E, H, I]; expert_ids int64 [T, k];
weights float32 [T, k]. Shared experts are the last of E, chosen by every token with weight 1.
Cost: 6 * T * k * H * I operations, and each chosen expert's 3 * H * I weights read once: bound by
bandwidth below some hundred tokens an expert, by arithmetic above.

Tokens are sorted by expert so that every expert sees one contiguous block of rows. The products with the
float32 weights are summed in float32 and cast back once, as in the reference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_experts(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """[T, H] in hidden's dtype; shapes as in this file's head."""
    grouped = hidden.is_cuda and hidden.dtype == torch.bfloat16
    return (_moe_grouped if grouped else moe_experts_reference)(hidden, gate_up, down, expert_ids, weights)


def moe_experts_reference(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """One expert after the other, any device and dtype."""
    order, rows, counts = _sort_by_expert(expert_ids, len(gate_up))
    blocks = hidden[rows].split(counts.tolist())
    outputs = [_mlp(block, gate_up[e], down[e]) for e, block in enumerate(blocks) if len(block)]
    return _combine(torch.cat(outputs), order, weights)


def _moe_grouped(hidden: Tensor, gate_up: Tensor, down: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """All experts in two grouped matrix products, without a trip to the host."""
    order, rows, counts = _sort_by_expert(expert_ids, len(gate_up))
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = F.grouped_mm(hidden[rows], gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return _combine(F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends), order, weights)


def _sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order [T * k] of the flat choices by expert, token of each, number of rows of each expert)."""
    flat = expert_ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return order, order // expert_ids.shape[1], counts


def _mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _combine(outputs: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Rows back in the order of the choices, [T, k, H], weighted and summed over k."""
    unsorted = torch.empty_like(outputs).index_copy_(0, order, outputs)
    return torch.einsum("tkh,tk->th", unsorted.unflatten(0, weights.shape).float(), weights).to(outputs.dtype)
