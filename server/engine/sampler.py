"""Requests' sampling parameters and logits -> tokens and log-probabilities, on the device.

The mathematics is in `kernels.sample`; this module knows which rows want what, and skips what nobody wants.
Its decisions:

- temperature 0 is the argmax after penalties and bias; top_k, top_p and min_p say nothing then.
- The repetition penalty covers the prompt (with the image token's id, as the reference) and the generated
  tokens; presence and frequency penalties cover the generated ones alone (OpenAI's definition).
- Until min_tokens are generated, eos (unless ignore_eos) and the stop ids can't be chosen.
- Log-probabilities are the model's own: of the logits before penalties, bias and temperature. -inf becomes
  MIN_LOGPROB, since JSON has no infinity.
- A drawn token depends on its logits, the request's seed and its position in the sequence, not on the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sample import penalize, sample_tokens, token_logprobs, truncate
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

    def rows(self, requests: list[Request]) -> Tensor:
        """int64 [R]: each request's row, brought in line with its tokens if it is new or a step is repeated."""
        for request in requests:
            name = request.request_id
            if name not in self._row_of:
                self._row_of[name] = self._free.pop()
            if self._length_of.get(name) != request.num_tokens:
                self._fill(self._row_of[name], request)
                self._length_of[name] = request.num_tokens
        return torch.tensor([self._row_of[request.request_id] for request in requests], device=self.counts.device)

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


class Sampler:
    def __init__(self, max_num_seqs: int, vocab_size: int, eos_token_id: int, device: torch.device) -> None:
        self.eos_token_id = eos_token_id
        self.device = device
        self.history = TokenHistory(max_num_seqs, vocab_size, device)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request; if it comes back, its record is made anew from its tokens."""
        self.history.forget(request_id)

    def sample(self, logits: Tensor, requests: list[Request]) -> Sampled:
        """logits float32 [R, V], one row for each request; they are left as they are."""
        adjusted = logits.clone()
        penalised = [row for row, request in enumerate(requests) if _is_penalised(request.sampling)]
        history = self._penalise(adjusted, penalised, requests) if penalised else None
        self._add_bias(adjusted, requests)
        best = adjusted.max(dim=-1)
        tokens = best.indices
        drawn = [row for row, request in enumerate(requests) if not request.sampling.greedy]
        if drawn:
            tokens[drawn] = self._draw(adjusted[drawn], [requests[row] for row in drawn])
        if history is not None:
            self.history.append([requests[row] for row in penalised], history, tokens[penalised])
        return Sampled(requests, tokens, best.values.isfinite(), self._logprobs(logits, tokens, requests))

    def _penalise(self, logits: Tensor, rows: list[int], requests: list[Request]) -> Tensor:
        """Penalise those rows in place; returns their rows in the history, int64 [len(rows)]."""
        chosen = [requests[row] for row in rows]
        history = self.history.rows(chosen)
        logits[rows] = penalize(
            logits[rows],
            self.history.in_prompt[history],
            self.history.counts[history],
            self._column([request.sampling.repetition_penalty for request in chosen]),
            self._column([request.sampling.presence_penalty for request in chosen]),
            self._column([request.sampling.frequency_penalty for request in chosen]),
        )
        return history

    def _add_bias(self, logits: Tensor, requests: list[Request]) -> None:
        rows: list[int] = []
        ids: list[int] = []
        values: list[float] = []
        for row, request in enumerate(requests):
            bias = dict(request.sampling.logit_bias)
            bias.update(dict.fromkeys(self._banned(request), -math.inf))
            rows += [row] * len(bias)
            ids += bias.keys()
            values += bias.values()
        if rows:
            logits[rows, ids] += self._column(values)

    def _banned(self, request: Request) -> list[int]:
        if request.num_generated >= request.sampling.min_tokens:
            return []
        return request.sampling.stop_token_ids + ([] if request.sampling.ignore_eos else [self.eos_token_id])

    def _draw(self, logits: Tensor, requests: list[Request]) -> Tensor:
        params = [request.sampling for request in requests]
        logits = logits / self._column([p.temperature for p in params])[:, None]
        cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
        if cut:
            logits[cut] = truncate(
                logits[cut],
                torch.tensor([params[row].top_k for row in cut], device=self.device),
                self._column([params[row].top_p for row in cut]),
                self._column([params[row].min_p for row in cut]),
            )
        seeds = torch.tensor([_signed(request.seed) for request in requests], device=self.device)
        positions = torch.tensor([request.num_tokens for request in requests], device=self.device)
        return sample_tokens(logits, seeds, positions)

    def _logprobs(self, logits: Tensor, tokens: Tensor, requests: list[Request]) -> Logprobs | None:
        wanted = {row: r.sampling.logprobs for row, r in enumerate(requests) if r.sampling.logprobs is not None}
        if not wanted:
            return None
        rows = list(wanted)
        num_top = min(max(wanted.values()), logits.shape[-1])
        return Logprobs(rows, *token_logprobs(logits[rows], tokens[rows], num_top))

    def _column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _signed(seed: int) -> int:
    """The seed's low 64 bits as a signed number."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
