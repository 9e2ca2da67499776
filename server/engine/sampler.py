"""Requests' sampling parameters and logits -> tokens and log-probabilities, on the device.

The mathematics is in `kernels.sample`; this module knows which rows want what, and skips what nobody wants.
Its decisions:

- temperature 0 is the argmax after penalties and bias; top_k, top_p and min_p say nothing then.
- The repetition penalty covers the prompt (with the image token's id, as the reference) and the generated
  tokens; presence and frequency penalties cover the generated ones alone (OpenAI's definition).
- Until min_tokens are generated, eos (unless ignore_eos) and the stop ids can't be chosen.
- A request's grammar wins over all of these: what it forbids can't be chosen, and where it leaves nothing but eos or
  a stop id, min_tokens and ignore_eos give way. The token is drawn from what is left, so the noise of a seed stays.
- Log-probabilities are the model's own: of the logits before penalties, bias and temperature. -inf becomes
  MIN_LOGPROB, since JSON has no infinity.
- A drawn token depends on its logits, the request's seed and its position in the sequence, not on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.sample import choose
from kernels.sample_rules import BIAS, MAX_TOP, PLAIN, RULE, Outcome, Rules
from server.engine.history import TokenHistory
from server.engine.request import MAX_LOGPROBS, Request, SamplingParams, TokenLogprobs

MIN_LOGPROB = -9999.0

assert MAX_LOGPROBS <= MAX_TOP


@dataclass(frozen=True)
class Sampled:
    """The outcome of a step, on its way from the device to the host."""

    requests: list[Request]
    token_ids: Tensor  # int64 [R], on the device
    outcome: Outcome  # on the host, once `arrived`
    arrived: torch.cuda.Event | None  # None on the CPU

    def collect(self) -> list[SampledToken | None]:
        """The step's tokens: the one place that waits for the device, and only for this step. None for a broken row."""
        if self.arrived is not None:
            self.arrived.synchronize()
        records = self._collect_logprobs() if self.outcome.logprobs else {}
        return [
            SampledToken(token, records.get(row)) if good else None
            for row, (token, good) in enumerate(
                zip(self.outcome.tokens.tolist(), self.outcome.finite.tolist(), strict=True)
            )
        ]

    def _collect_logprobs(self) -> dict[int, TokenLogprobs]:
        records = {}
        for row, request in enumerate(self.requests):
            wanted = request.sampling.logprobs
            if wanted is not None:
                ids = self.outcome.top_ids[row, :wanted].tolist()
                values = self.outcome.top[row, :wanted].clamp(min=MIN_LOGPROB).tolist()
                chosen = max(float(self.outcome.chosen[row]), MIN_LOGPROB)
                records[row] = TokenLogprobs(chosen, list(zip(ids, values, strict=True)))
        return records


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class Wishes:
    """What a request wants of every step, worked out once."""

    params: SamplingParams
    rule: bytes  # its record, but for what changes from step to step
    cuts: bool
    penalised: bool
    bias: bytes  # its BIASes
    biased: bool  # a bias, or ids that are banned at first
    plain: bool  # greedy and nothing else


@dataclass(frozen=True)
class SamplingBatch:
    """What the requests of a step want, on the device before the step's logits are. Rules None: all are plain."""

    requests: list[Request]
    rules: Rules | None
    guided: list[int]  # rows whose request has a grammar
    penalised: list[Request]


class Sampler:
    """`prepare` before the forward pass, `sample` after it: neither waits for the device."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_id: int, device: torch.device) -> None:
        if vocab_size < MAX_LOGPROBS:
            raise ValueError(f"a vocabulary of {vocab_size} has fewer tokens than may be asked for: {MAX_LOGPROBS}")
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.device = device
        self.history = TokenHistory(max_num_seqs, vocab_size, device)
        self._wishes: dict[str, Wishes] = {}
        if device.type == "cuda":
            self._compile()

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; if it comes back, its record is made anew from its tokens."""
        self.history.forget(request_id)
        self._wishes.pop(request_id, None)

    def prepare(self, requests: list[Request]) -> SamplingBatch:
        wishes = [self._wishes_of(request) for request in requests]
        if all(wish.plain for wish in wishes):
            return SamplingBatch(requests, None, guided=[], penalised=[])
        records = np.frombuffer(bytearray().join(wish.rule for wish in wishes), dtype=RULE)
        records["position"] = [request.num_tokens for request in requests]
        with_history = [row for row, wish in enumerate(wishes) if wish.penalised]
        penalised = [requests[row] for row in with_history]
        records["history"][with_history] = self.history.rows(penalised)
        guided = [row for row, request in enumerate(requests) if request.guide is not None]
        records["guide"][guided] = range(len(guided))
        bias = self._bias(records, requests, wishes)
        adjusted = (records["history"] >= 0) | (records["guide"] >= 0) | (records["bias_last"] > records["bias_first"])
        num_places = int(adjusted.sum())
        records["place"][adjusted] = range(num_places)
        flat = self._upload(Rules.flat(records, bias))
        rules = Rules(
            *Rules.split(flat, len(requests)),
            in_prompt=self.history.in_prompt,
            counts=self.history.counts,
            num_places=num_places,
            cuts=any(wish.cuts for wish in wishes),
            num_top=int(records["num_top"].max()),
        )
        return SamplingBatch(requests, rules, guided, penalised)

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """logits float32 [R, V], one row for each request of the batch; they are left as they are.

        The outcome's way to the host begins at once.
        """
        allowed = self._allowed([batch.requests[row] for row in batch.guided]) if batch.guided else None
        outcome = choose(logits, batch.rules, allowed)
        self.history.expect(batch.penalised)
        if not logits.is_cuda:
            return Sampled(batch.requests, outcome.tokens, outcome, None)
        on_host = outcome.to_pinned()
        arrived = torch.cuda.Event()
        arrived.record()
        return Sampled(batch.requests, outcome.tokens, on_host, arrived)

    def _compile(self) -> None:
        """Have every form of the kernels compiled, so that no request waits for it."""
        logits = torch.zeros(1, self.vocab_size, device=self.device)
        choose(logits, None, None)
        for cuts in (False, True):
            records, bias = Rules.split(self._upload(Rules.flat(PLAIN.reshape(1), np.zeros(0, BIAS))), 1)
            choose(logits, Rules(records, bias, self.history.in_prompt, self.history.counts, 0, cuts, num_top=-1), None)

    def _wishes_of(self, request: Request) -> Wishes:
        wishes = self._wishes.get(request.request_id)
        if wishes is None or wishes.params is not request.sampling:
            wishes = self._wishes[request.request_id] = self._make_wishes(request)
        return wishes

    def _make_wishes(self, request: Request) -> Wishes:
        params = request.sampling
        rule = PLAIN.copy()
        rule["seed"] = _signed(request.seed)
        if not params.greedy:
            rule["inverse_temperature"] = 1 / params.temperature
            rule["top_k"] = min(params.top_k, self.vocab_size)
            rule["top_p"] = params.top_p
            rule["log_min_p"] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        rule["repetition"] = params.repetition_penalty
        rule["presence"], rule["frequency"] = params.presence_penalty, params.frequency_penalty
        if params.logprobs is not None:
            rule["num_top"] = params.logprobs
        penalised = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        biased = bool(params.logit_bias) or params.min_tokens > 0
        special = penalised or biased or params.logprobs is not None or request.guide is not None
        return Wishes(
            params=params,
            rule=rule.tobytes(),
            cuts=not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
            penalised=penalised,
            bias=np.array(sorted(params.logit_bias.items()), dtype=BIAS).tobytes(),
            biased=biased,
            plain=params.greedy and not special,
        )

    def _bias(
        self, records: npt.NDArray[np.void], requests: list[Request], wishes: list[Wishes]
    ) -> npt.NDArray[np.void]:
        """The BIASes of all rows, side by side; their places go into the records."""
        parts, lengths = [], [0] * len(requests)
        for row, (request, wish) in enumerate(zip(requests, wishes, strict=True)):
            if wish.biased:
                part = wish.bias
                banned = self._banned(request) if request.guide is None else []
                if banned:
                    entries = request.sampling.logit_bias | dict.fromkeys(banned, -math.inf)
                    part = np.array(sorted(entries.items()), dtype=BIAS).tobytes()
                parts.append(part)
                lengths[row] = len(part) // BIAS.itemsize
        records["bias_last"] = np.cumsum(lengths)
        records["bias_first"] = records["bias_last"] - lengths
        return np.frombuffer(b"".join(parts), dtype=BIAS)

    def _banned(self, request: Request) -> list[int]:
        if request.num_generated >= request.sampling.min_tokens:
            return []
        return request.sampling.stop_token_ids + ([] if request.sampling.ignore_eos else [self.eos_token_id])

    def _allowed(self, requests: list[Request]) -> Tensor:
        """The tokens that each request's grammar allows, a bit each: int32 [N, ceil(V / 32)].

        Filled here on the host, after the forward pass was launched: the device computes meanwhile.
        """
        allowed = torch.empty(len(requests), -(-self.vocab_size // 32), dtype=torch.int32)
        for words, request in zip(allowed.numpy(), requests, strict=True):
            assert request.guide is not None
            # Where the text could end, eos would end it: a request that ignores eos goes on if it can.
            eos = [self.eos_token_id] if request.sampling.ignore_eos else []
            request.guide.fill(words, avoid=self._banned(request) + eos)
        return self._upload(allowed)

    def _upload(self, values: Tensor) -> Tensor:
        return values if self.device.type == "cpu" else values.pin_memory().to(self.device, non_blocking=True)


def _signed(seed: int) -> int:
    """The seed's low 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
