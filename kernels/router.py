"""Which experts a token goes to, and with what weight: the three methods of the DeepSeek-V2 and V3 gates.

    scores = softmax(W x)  or  sigmoid(W x)                                    float32 throughout
    greedy                 the k best of all experts
    group_limited_greedy   groups ranked by their best expert; the k best of the topk_group best groups
    noaux_tc               scores + bias choose (groups by the sum of their two best); the bias is not in the weight
    weight = score of the chosen, divided by the chosen ones' sum (+ 1e-20) where normalised, times the scaling factor

hidden [T, hidden_size] any float dtype, weight float32 [experts, hidden_size].
Cost: T * experts * hidden_size multiply-adds; the weight read once.
"""

import torch
from torch import Tensor


def route(
    hidden: Tensor,
    weight: Tensor,
    correction_bias: Tensor | None,
    *,
    topk: int,
    method: str,
    scoring: str,
    normalize: bool,
    scaling_factor: float,
    num_groups: int,
    topk_groups: int,
) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 [T, topk], in no defined order, and their weights float32 [T, topk]."""
    logits = hidden.float() @ weight.t()
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    if method == "greedy":
        chosen = scores.topk(topk, dim=-1, sorted=False).indices
    elif method == "group_limited_greedy":
        groups = scores.unflatten(-1, (num_groups, -1))
        chosen = _best_in_groups(scores, groups.amax(-1), topk_groups, topk)
    elif method == "noaux_tc":
        if correction_bias is None:
            raise ValueError("noaux_tc needs a correction bias")
        biased = scores + correction_bias
        groups = biased.unflatten(-1, (num_groups, -1))
        chosen = _best_in_groups(biased, groups.topk(2, dim=-1).values.sum(-1), topk_groups, topk)
    else:
        raise ValueError(f"unknown routing method {method!r}")
    weights = scores.gather(-1, chosen)
    if normalize and topk > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * scaling_factor


def _best_in_groups(scores: Tensor, group_scores: Tensor, topk_groups: int, topk: int) -> Tensor:
    """The topk experts of scores [T, experts] within the topk_groups best of group_scores [T, groups]."""
    best = group_scores.topk(topk_groups, dim=-1, sorted=False).indices
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
    experts_per_group = scores.shape[-1] // group_scores.shape[-1]
    # The reference gives experts outside the chosen groups the score 0.0, not minus infinity.
    masked = scores.masked_fill(~allowed.repeat_interleave(experts_per_group, dim=-1), 0.0)
    return masked.topk(topk, dim=-1, sorted=False).indices
