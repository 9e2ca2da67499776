"""From logits to tokens: penalties, bias, truncation, seeded noise, log-probabilities.

R rows of logits over a vocabulary of V, float32. With l the logits of one row, in this order:

    repetition   l[i] > 0: l[i] / r, else l[i] * r      for i in the prompt or among the generated
    presence     l[i] - p                               for i among the generated
    frequency    l[i] - f * (times i was generated)
    bias         l[i] + b[i]
    mask         -inf                                   for i that the request's grammar forbids
    temperature  l * (1 / T)
    top-k        keep l[i] >= the k-th largest
    top-p        keep i while the mass of all larger ones is < p, of the mass that top-k left
    min-p        keep l[i] >= max l + log m             (softmax(l)[i] >= m * max softmax(l))

and the token is argmax(l + g), with g Gumbel noise, which draws from softmax(l). The noise is a function of
(seed, position, i) alone: a 64-bit counter hash (splitmix64's finaliser) in integer arithmetic, the same on
every device and whatever else is in the batch. Greedy rows take argmax(l) before the temperature.

Equals: what is kept depends on the values alone, so equals of the last one kept stay with it (and of the largest,
always). Of equals in the end, the lowest id wins. A row whose adjusted logits hold a NaN, or whose largest is not
finite, gives no token.

Cost of the reference: a few passes over R * V numbers, one sort of the rows that want top-k, top-p or min-p. That of
the Triton form, which gives the same tokens up to the rounding of float32, is told in `kernels.sample_triton`.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.lang import use_triton
from kernels.sample_rules import RULE, Outcome, Rules
from kernels.sample_triton import choose_triton

# splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), as signed 64-bit numbers.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MULTIPLIER_2 = 0x94D049BB133111EB - (1 << 64)


def choose(logits: Tensor, rules: Rules | None, allowed: Tensor | None) -> Outcome:
    """A token for each row of logits, float32 [R, V], which are left as they are. Nothing waits for the device.

    rules None: greedy, and nothing else. allowed int32 [G, ceil(V / 32)], what the grammars of rows with a guide allow
    (`mask_tokens`). Tokens of rows with a history are counted in `rules.counts`.
    Raises ValueError on logits of another dtype or shape.
    """
    if logits.dtype != torch.float32 or logits.dim() != 2:
        raise ValueError(f"logits must be float32 [rows, vocabulary], not {logits.dtype} {list(logits.shape)}")
    return (choose_triton if use_triton(logits) else choose_reference)(logits, rules, allowed)


def choose_reference(logits: Tensor, rules: Rules | None, allowed: Tensor | None) -> Outcome:
    """`choose`, an operation at a time; on a device it waits for the rules."""
    out = Outcome.empty(len(logits), rules is not None and rules.num_top >= 0, logits.device)
    if rules is None:
        best = logits.max(dim=-1)
        out.tokens.copy_(best.indices)
        out.finite.copy_(best.values.isfinite())
        return out
    records = rules.records.cpu().numpy().view(RULE)[:, 0]

    def field(name: str, rows: Tensor) -> Tensor:
        return torch.from_numpy(records[name].copy()).to(logits.device)[rows]

    def rows_where(condition: npt.NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.flatnonzero(condition)).to(logits.device)

    adjusted = logits.clone()
    penalised = rows_where(records["history"] >= 0)
    history = field("history", penalised)
    adjusted[penalised] = penalize(
        adjusted[penalised],
        rules.in_prompt[history],
        rules.counts[history],
        field("repetition", penalised),
        field("presence", penalised),
        field("frequency", penalised),
    )
    lengths = torch.from_numpy(records["bias_last"] - records["bias_first"]).to(logits.device)
    biased = torch.arange(len(logits), device=logits.device).repeat_interleave(lengths)
    adjusted[biased, rules.bias[:, 0].long()] += rules.bias[:, 1].view(torch.float32)
    if allowed is not None:
        guided = rows_where(records["guide"] >= 0)
        adjusted[guided] = mask_tokens(adjusted[guided], allowed[field("guide", guided)])
    best = adjusted.max(dim=-1)
    out.tokens.copy_(best.indices)
    out.finite.copy_(best.values.isfinite())

    drawn = rows_where(records["inverse_temperature"] > 0)
    scores = adjusted[drawn] * field("inverse_temperature", drawn)[:, None]
    top_k, top_p, log_min_p = (field(name, drawn) for name in ("top_k", "top_p", "log_min_p"))
    cut = ((top_k > 0) | (top_p < 1) | (log_min_p > -math.inf)).nonzero()[:, 0]
    scores[cut] = truncate(scores[cut], top_k[cut], top_p[cut], log_min_p[cut])
    out.tokens[drawn] = sample_tokens(scores, field("seed", drawn), field("position", drawn))
    rules.counts[history, out.tokens[penalised]] += 1
    if out.logprobs:
        told = rows_where(records["num_top"] >= 0)
        out.chosen[told], ids, values = token_logprobs(logits[told], out.tokens[told], rules.num_top)
        out.top_ids[told, : rules.num_top], out.top[told, : rules.num_top] = ids.int(), values
    return out


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


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """Logits [R, V], tempered already, with -inf for what top-k, then top-p, then min-p leave out.

    top_k of any integer type [R], 0 or less is off; top_p float32 [R], 1 is off; log_min_p float32 [R], the logarithm
    of min-p, -inf is off. The largest logit always stays.
    """
    vocab_size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size)
    kept = ordered >= ordered.gather(1, k[:, None].long() - 1)
    # In float64, so that the sum's order, which a device is free to choose, does not move the border.
    probs = ordered.masked_fill(~kept, -math.inf).softmax(dim=-1, dtype=torch.float64)
    before = probs.cumsum(dim=-1) - probs
    # Equals share the mass of all that are larger: that of the first of them.
    index = torch.arange(vocab_size, device=logits.device).expand_as(ordered)
    first = torch.where(ordered == ordered.roll(1, dims=-1), 0, index).cummax(dim=-1).values
    kept &= (before.gather(1, first) < top_p[:, None]) | (top_p >= 1)[:, None]
    kept &= ordered >= ordered[:, :1] + log_min_p[:, None]
    kept |= ordered == ordered[:, :1]
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
