"""From logits to tokens: penalties, bias, truncation, seeded noise, log-probabilities.

R rows of logits over a vocabulary of V, float32. With l the logits of one row, in this order:

    repetition   l[i] > 0: l[i] / r, else l[i] * r      for i in the prompt or among the generated
    presence     l[i] - p                               for i among the generated
    frequency    l[i] - f * (times i was generated)
    bias         l[i] + b[i]
    mask         -inf                                   for i that the request's grammar forbids
    temperature  l / T
    top-k        keep l[i] >= the k-th largest          (equals of the k-th stay)
    top-p        keep i while the mass of all larger ones is < p
    min-p        keep softmax(l)[i] >= m * max softmax(l)

and the token is argmax(l + g), with g Gumbel noise, which draws from softmax(l). The noise is a function of
(seed, position, i) alone: a 64-bit counter hash (splitmix64's finaliser) in integer arithmetic, the same on
every device and whatever else is in the batch. Greedy rows take argmax(l) before the temperature; the first of
equals wins. Cost: a few passes over R * V numbers, one sort of them where top-k, top-p or min-p is on.
"""

import math

import torch
from torch import Tensor

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


def penalize(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Logits [R, V] after the three penalties.

    in_prompt bool [R, V]; counts int32 [R, V], times generated; the penalties float32 [R] (1, 0 and 0 are off).
    """
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(in_prompt | (counts > 0), repeated, logits)
    return logits - presence[:, None] * (counts > 0) - frequency[:, None] * counts


def mask_tokens(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [R, V] with -inf where there is no bit in `allowed`.

    allowed int32 [R, ceil(V / 32)]: bit i % 32 of word i // 32 is token i's.
    """
    index = torch.arange(logits.shape[-1], device=logits.device)
    bits = allowed[:, index // 32] >> (index % 32).int() & 1
    return logits.masked_fill(bits == 0, -math.inf)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [R, V], tempered already, with -inf for what top-k, then top-p, then min-p leave out.

    top_k int64 [R], 0 or less is off; top_p float32 [R], 1 is off; min_p float32 [R], 0 is off. The largest
    logit always stays.
    """
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kept = ordered >= ordered.gather(1, k[:, None] - 1)
    # In float64, so that the sum's order, which a device is free to choose, does not move the border.
    probs = ordered.masked_fill(~kept, -math.inf).softmax(dim=-1, dtype=torch.float64)
    larger = probs.cumsum(dim=-1) - probs
    kept &= (larger < top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= ordered >= ordered[:, :1] + min_p.log()[:, None]
    kept[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(kept).scatter_(1, order, kept), -math.inf)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float32 [R, V], from seeds and positions, int64 [R] each."""
    stream = _mix(_mix(seeds) + positions)
    index = torch.arange(1, vocab_size + 1, device=seeds.device)
    bits = _mix(stream[:, None] + index * _GAMMA)
    # 53 bits to (0, 1). The winners are those near 0, where a float32 resolves 2**-53 as well as it does 1/2. At 1 the
    # noise would be -inf, which forbids a token, be it the only one left.
    uniform = ((_shift_right(bits, 11) + 1).to(torch.float32) * 2.0**-53).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def sample_tokens(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """One token a row, int64 [R], drawn from softmax(logits) by the row's seed and position."""
    return (logits + gumbel_noise(seeds, positions, logits.shape[-1])).argmax(dim=-1)


def token_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under softmax(logits): of `tokens` [R], and ids and values [R, num_top] of the best."""
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(num_top, dim=-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], top.indices, top.values


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: zeros come in from the left, whatever the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
