"""Which experts a token goes to, and with what weight: the three methods of the DeepSeek-V2 and V3 gates.

    scores = softmax(W x)  or  sigmoid(W x)                                    float32 throughout
    greedy                 the k best of all experts
    group_limited_greedy   groups ranked by their best expert; the k best of the topk_group best groups
    noaux_tc               scores + bias choose (groups by the sum of their two best); the bias is not in the weight
    weight = score of the chosen, divided by the chosen ones' sum (+ 1e-20) where normalised, times the scaling factor

hidden [T, hidden_size] any float dtype, weight float32 [experts, hidden_size].
Cost: T * experts * hidden_size multiply-adds; the weight read once.

The Triton form takes two launches: the logits, and, a program a token, the choice. It serves one group. The logits of
few tokens are a row of W a time in registers; those of many are a product by matrix units, where float32 weights are
split in two parts of 11 bits (tf32x3: what is lost is below 2^-21 of a term), and float32 tokens multiplied as such.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.batch_invariant import linear, whole_vectors
from kernels.expect import FLOATS, expect
from kernels.lang import pdl, tl, triton, use_triton

_MOST_CHOICES = 16
"""Experts a token that the Triton form can choose."""
_LEAST = tl.constexpr(torch.finfo(torch.float32).min)
_FEW_TOKENS = 64
"""Up to this many, the logits are computed token by token."""


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
    num_shared: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Experts int64 [T, topk + num_shared], and their weights float32 of the same shape.

    The chosen come first, in no defined order; then the shared experts, numbered after the routed, with weight 1.
    `batch_invariant` makes the Triton form compute a token alike in any batch.
    """
    if use_triton(hidden) and num_groups == 1 and method in ("greedy", "noaux_tc") and topk <= _MOST_CHOICES:
        bias = correction_bias if method == "noaux_tc" else None
        return route_triton(
            hidden,
            weight,
            bias,
            topk=topk,
            scoring=scoring,
            normalize=normalize,
            scaling_factor=scaling_factor,
            num_shared=num_shared,
            batch_invariant=batch_invariant,
        )
    logits = linear(hidden.float(), weight, batch_invariant=batch_invariant)
    scores = logits.softmax(-1) if scoring == "softmax" else whole_vectors(torch.sigmoid, logits)
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
    shared = torch.arange(len(weight), len(weight) + num_shared, device=hidden.device)
    chosen = torch.cat((chosen, shared.expand(len(chosen), -1)), dim=-1)
    return chosen, F.pad(weights * scaling_factor, (0, num_shared), value=1.0)


def _best_in_groups(scores: Tensor, group_scores: Tensor, topk_groups: int, topk: int) -> Tensor:
    """The topk experts of scores [T, experts] within the topk_groups best of group_scores [T, groups]."""
    best = group_scores.topk(topk_groups, dim=-1, sorted=False).indices
    allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best, True)
    experts_per_group = scores.shape[-1] // group_scores.shape[-1]
    # The reference gives experts outside the chosen groups the score 0.0, not minus infinity.
    masked = scores.masked_fill(~allowed.repeat_interleave(experts_per_group, dim=-1), 0.0)
    return masked.topk(topk, dim=-1, sorted=False).indices


def route_triton(
    hidden: Tensor,
    weight: Tensor,
    correction_bias: Tensor | None,
    *,
    topk: int,
    scoring: str,
    normalize: bool,
    scaling_factor: float,
    num_shared: int = 0,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    tokens, experts = len(hidden), len(weight)
    if not 0 < topk <= min(experts, _MOST_CHOICES):
        raise ValueError(f"{topk} of {experts} experts cannot be chosen, at most {_MOST_CHOICES}")
    expect("hidden", hidden, (tokens, weight.shape[1]), *FLOATS)
    expect("weight", weight, weight.shape, torch.float32)
    if correction_bias is not None:
        expect("correction_bias", correction_bias, (experts,), torch.float32)
    logits = _logits_triton(hidden, weight, by_blocks=batch_invariant or tokens > _FEW_TOKENS)
    chosen = torch.empty(tokens, topk + num_shared, dtype=torch.int64, device=hidden.device)
    weights = torch.empty(tokens, topk + num_shared, dtype=torch.float32, device=hidden.device)
    _choose[(tokens,)](
        logits,
        correction_bias if correction_bias is not None else logits,
        chosen,
        weights,
        experts,
        scaling_factor,
        TOPK=topk,
        SHARED=num_shared,
        EXPERTS=triton.next_power_of_2(experts),
        SOFTMAX=scoring == "softmax",
        BIASED=correction_bias is not None,
        NORMALIZE=normalize and topk > 1,
        CHOICES=_MOST_CHOICES,
        num_warps=1,
        **pdl(hidden),
    )
    return chosen, weights


def _logits_triton(hidden: Tensor, weight: Tensor, *, by_blocks: bool) -> Tensor:
    """Float32 [T, experts]; by blocks of tokens, or token by token."""
    (tokens, width), experts = hidden.shape, len(weight)
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=hidden.device)
    if by_blocks:
        rows = 32
        _logits_of_blocks[(triton.cdiv(tokens, rows),)](
            hidden,
            weight,
            logits,
            tokens,
            experts,
            width,
            ROWS=rows,
            EXPERTS=max(triton.next_power_of_2(experts), 16),
            DEPTH=64,
            PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32x3",
            num_warps=8,  # with 4 the sums of base's 72 experts do not fit in registers
            num_stages=3,
            **pdl(hidden),
        )
    else:
        _logits[(tokens, triton.cdiv(experts, 2))](
            hidden,
            weight,
            logits,
            experts,
            width,
            EXPERTS=2,
            WIDTH=triton.next_power_of_2(width),
            num_warps=4,
            **pdl(hidden),
        )
    return logits


@triton.jit
def _logits(hidden, weight, logits, experts, width, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """A few experts' logits of one token; their weights are on their way before the token exists."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    present = expert < experts
    column = tl.arange(0, WIDTH)
    used = column < width
    w = tl.load(weight + expert[:, None] * width + column[None, :], mask=present[:, None] & used[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(hidden + token * width + column, mask=used, other=0.0).to(tl.float32)
    tl.store(logits + token * experts + expert, tl.sum(w * x[None, :], 1), mask=present)


@triton.jit
def _logits_of_blocks(
    hidden,
    weight,
    logits,
    tokens,
    experts,
    width,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """All experts' logits of ROWS tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    here, present = token < tokens, expert < experts
    acc = tl.zeros((ROWS, EXPERTS), tl.float32)
    for first in range(0, width, DEPTH):
        at = first + tl.arange(0, DEPTH)
        used = at < width
        x = tl.load(hidden + token[:, None] * width + at[None, :], mask=here[:, None] & used[None, :], other=0.0)
        w = tl.load(weight + expert[None, :] * width + at[:, None], mask=present[None, :] & used[:, None], other=0.0)
        acc = tl.dot(x.to(tl.float32), w, acc, input_precision=PRECISION)
    tl.store(logits + token[:, None] * experts + expert[None, :], acc, mask=here[:, None] & present[None, :])


@triton.jit
def _choose(
    logits,
    bias,
    chosen,
    weights,
    experts,
    scaling_factor,
    TOPK: tl.constexpr,
    SHARED: tl.constexpr,
    EXPERTS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """The TOPK best experts of one token; of equals, the lowest number."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    present = expert < experts
    x = tl.load(logits + token * experts + expert, mask=present, other=float("-inf"))
    if SOFTMAX:
        exponent = tl.exp(x - tl.max(x, 0))
        scores = exponent / tl.sum(exponent, 0)
    else:
        scores = tl.where(present, 1 / (1 + tl.exp(-x)), 0.0)
    rating = scores
    if BIASED:
        rating += tl.load(bias + expert, mask=present, other=0.0)
    # A NaN compares with nothing, and might lose to a place beyond the experts: it counts as the least number.
    rating = tl.where(rating == rating, rating, _LEAST)
    rating = tl.where(present, rating, float("-inf"))
    row = token * (TOPK + SHARED)
    total = 0.0
    for place in tl.static_range(TOPK):
        best = tl.argmax(rating, 0)
        score = tl.sum(tl.where(expert == best, scores, 0.0), 0)
        total += score
        rating = tl.where(expert == best, float("-inf"), rating)
        tl.store(chosen + row + place, best.to(tl.int64))
        tl.store(weights + row + place, score * scaling_factor)
    for place in tl.static_range(SHARED):
        tl.store(chosen + row + TOPK + place, (experts + place).to(tl.int64))
        tl.store(weights + row + TOPK + place, 1.0)
    if NORMALIZE:
        place = tl.arange(0, CHOICES)
        tl.debug_barrier()
        values = tl.load(weights + row + place, mask=place < TOPK)
        tl.store(weights + row + place, values / (total + 1e-20), mask=place < TOPK)
