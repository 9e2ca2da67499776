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

import torch
from torch import Tensor

from kernels.sample import mask_tokens, penalize, sample_tokens, token_logprobs, truncate
from server.engine.request import Request, SamplingParams, TokenLogprobs

MIN_LOGPROB = -9999.0


@dataclass(frozen=True)
class Logprobs:
    """Of the L rows that asked for them; K the largest number of best ones any of them wants."""

    rows: list[int]
    chosen: Tensor  # float32 [L]
    top_ids: Tensor  # int64 [L, K]
    top: Tensor  # float32 [L, K]


@dataclass(frozen=True)
class Sampled:
    """The outcome of a step, still on the device."""

    requests: list[Request]
    token_ids: Tensor  # int64 [R]
    finite: Tensor  # bool [R]: false where the model's logits were not numbers
    logprobs: Logprobs | None

    def collect(self) -> list[SampledToken | None]:
        """Bring the tokens to the host: the one place where a step waits for the device. None for a broken row."""
        tokens, finite = torch.stack((self.token_ids, self.finite.long())).tolist()
        records = self._collect_logprobs() if self.logprobs is not None else {}
        return [
            SampledToken(token, records.get(row)) if good else None
            for row, (token, good) in enumerate(zip(tokens, finite, strict=True))
        ]

    def _collect_logprobs(self) -> dict[int, TokenLogprobs]:
        assert self.logprobs is not None
        chosen = self.logprobs.chosen.clamp(min=MIN_LOGPROB).tolist()
        ids, values = self.logprobs.top_ids.tolist(), self.logprobs.top.clamp(min=MIN_LOGPROB).tolist()
        records = {}
        for i, row in enumerate(self.logprobs.rows):
            wanted = self.requests[row].sampling.logprobs
            assert wanted is not None
            records[row] = TokenLogprobs(chosen[i], list(zip(ids[i][:wanted], values[i][:wanted], strict=True)))
        return records


@dataclass(frozen=True)
class SampledToken:
    token_id: int
    logprobs: TokenLogprobs | None


class TokenHistory:
    """What penalised requests have seen: a row each of in-prompt flags and counts of generated tokens."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._row_of: dict[str, int] = {}
        self._length_of: dict[str, int] = {}  # tokens its row stands for
        self._free = list(range(max_num_seqs))

    def rows(self, requests: list[Request]) -> list[int]:
        """Each request's row, brought in line with its tokens if it is new or a step is repeated."""
        for request in requests:
            name = request.request_id
            if name not in self._row_of:
                self._row_of[name] = self._free.pop()
            if self._length_of.get(name) != request.num_tokens:
                self._fill(self._row_of[name], request)
                self._length_of[name] = request.num_tokens
        return [self._row_of[request.request_id] for request in requests]

    def append(self, requests: list[Request], rows: Tensor, tokens: Tensor) -> None:
        """Count a token for each; it stays on the device, so that the next step need not wait for the host."""
        self.counts[rows, tokens] += 1
        for request in requests:
            self._length_of[request.request_id] += 1

    def forget(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._free.append(row)
            del self._length_of[request_id]

    def _fill(self, row: int, request: Request) -> None:
        tokens = torch.tensor(request.token_ids, device=self.counts.device)
        prompt, generated = tokens[: request.num_prompt], tokens[request.num_prompt :]
        self.in_prompt[row].zero_()[prompt] = True
        self.counts[row] = torch.bincount(generated, minlength=self.counts.shape[1])


@dataclass(frozen=True)
class Penalties:
    rows: Tensor  # int64 [N], rows of the logits
    requests: list[Request]
    history: Tensor  # int64 [N], their rows of the history
    repetition: Tensor  # float32 [N], as the other two
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True)
class Bias:
    """What is added at (row, id); -inf bans."""

    rows: Tensor  # int64 [N]
    ids: Tensor  # int64 [N]
    values: Tensor  # float32 [N]


@dataclass(frozen=True)
class Draws:
    rows: Tensor  # int64 [N], rows of the logits
    temperature: Tensor  # float32 [N]
    seeds: Tensor  # int64 [N]
    positions: Tensor  # int64 [N]
    cuts: Cuts | None


@dataclass(frozen=True)
class Cuts:
    rows: Tensor  # int64 [M], rows of the draws
    top_k: Tensor  # int64 [M]
    top_p: Tensor  # float32 [M]
    min_p: Tensor  # float32 [M]


@dataclass(frozen=True)
class SamplingBatch:
    """What the requests of a step want, on the device before the step's logits are. None where nobody wants it."""

    requests: list[Request]
    penalties: Penalties | None
    bias: Bias | None
    guided: list[int]  # rows whose request has a grammar
    draws: Draws | None
    logprob_rows: list[int]
    logprob_index: Tensor  # int64 [L], the same
    num_top: int


class Sampler:
    """`prepare` before the forward pass, `sample` after it: between the two the host need not wait."""

    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_id: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.device = device
        self.history = TokenHistory(max_num_seqs, vocab_size, device)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; if it comes back, its record is made anew from its tokens."""
        self.history.forget(request_id)

    def prepare(self, requests: list[Request]) -> SamplingBatch:
        wanted = {row: r.sampling.logprobs for row, r in enumerate(requests) if r.sampling.logprobs is not None}
        return SamplingBatch(
            requests=requests,
            penalties=self._prepare_penalties(requests),
            bias=self._prepare_bias(requests),
            guided=[row for row, request in enumerate(requests) if request.guide is not None],
            draws=self._prepare_draws(requests),
            logprob_rows=list(wanted),
            logprob_index=self._integers(list(wanted)),
            num_top=min(max(wanted.values(), default=0), self.vocab_size),
        )

    def sample(self, logits: Tensor, batch: SamplingBatch) -> Sampled:
        """logits float32 [R, V], one row for each request of the batch; they are left as they are."""
        adjusted = logits.clone()
        if batch.penalties is not None:
            self._penalise(adjusted, batch.penalties)
        if batch.bias is not None:
            adjusted[batch.bias.rows, batch.bias.ids] += batch.bias.values
        if batch.guided:
            rows = self._integers(batch.guided)
            adjusted[rows] = mask_tokens(adjusted[rows], self._allowed([batch.requests[row] for row in batch.guided]))
        best = adjusted.max(dim=-1)
        tokens = best.indices
        if batch.draws is not None:
            tokens[batch.draws.rows] = _draw(adjusted[batch.draws.rows], batch.draws)
        if batch.penalties is not None:
            self.history.append(batch.penalties.requests, batch.penalties.history, tokens[batch.penalties.rows])
        logprobs = None
        if batch.logprob_rows:
            rows = batch.logprob_index
            logprobs = Logprobs(batch.logprob_rows, *token_logprobs(logits[rows], tokens[rows], batch.num_top))
        return Sampled(batch.requests, tokens, best.values.isfinite(), logprobs)

    def _penalise(self, logits: Tensor, penalties: Penalties) -> None:
        logits[penalties.rows] = penalize(
            logits[penalties.rows],
            self.history.in_prompt[penalties.history],
            self.history.counts[penalties.history],
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
        )

    def _prepare_penalties(self, requests: list[Request]) -> Penalties | None:
        rows = [row for row, request in enumerate(requests) if _is_penalised(request.sampling)]
        if not rows:
            return None
        chosen = [requests[row] for row in rows]
        return Penalties(
            rows=self._integers(rows),
            requests=chosen,
            history=self._integers(self.history.rows(chosen)),
            repetition=self._floats([request.sampling.repetition_penalty for request in chosen]),
            presence=self._floats([request.sampling.presence_penalty for request in chosen]),
            frequency=self._floats([request.sampling.frequency_penalty for request in chosen]),
        )

    def _prepare_bias(self, requests: list[Request]) -> Bias | None:
        rows: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for row, request in enumerate(requests):
            banned = self._banned(request) if request.guide is None else []
            bias = request.sampling.logit_bias | dict.fromkeys(banned, -math.inf)
            rows += [row] * len(bias)
            ids += bias.keys()
            values += bias.values()
        return Bias(self._integers(rows), self._integers(ids), self._floats(values)) if rows else None

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

    def _prepare_draws(self, requests: list[Request]) -> Draws | None:
        rows = [row for row, request in enumerate(requests) if not request.sampling.greedy]
        if not rows:
            return None
        chosen = [requests[row] for row in rows]
        return Draws(
            rows=self._integers(rows),
            temperature=self._floats([request.sampling.temperature for request in chosen]),
            seeds=self._integers([_signed(request.seed) for request in chosen]),
            positions=self._integers([request.num_tokens for request in chosen]),
            cuts=self._prepare_cuts([request.sampling for request in chosen]),
        )

    def _prepare_cuts(self, params: list[SamplingParams]) -> Cuts | None:
        rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
        if not rows:
            return None
        return Cuts(
            rows=self._integers(rows),
            top_k=self._integers([min(params[row].top_k, self.vocab_size) for row in rows]),
            top_p=self._floats([params[row].top_p for row in rows]),
            min_p=self._floats([params[row].min_p for row in rows]),
        )

    def _integers(self, values: list[int]) -> Tensor:
        return self._upload(torch.tensor(values, dtype=torch.int64))

    def _floats(self, values: list[float]) -> Tensor:
        return self._upload(torch.tensor(values, dtype=torch.float32))

    def _upload(self, values: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return values
        return values.pin_memory().to(self.device, non_blocking=True)


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    logits = logits / draws.temperature[:, None]
    cuts = draws.cuts
    if cuts is not None:
        logits[cuts.rows] = truncate(logits[cuts.rows], cuts.top_k, cuts.top_p, cuts.min_p)
    return sample_tokens(logits, draws.seeds, draws.positions)


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _signed(seed: int) -> int:
    """The seed's low 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
