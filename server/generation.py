"""Requests go to the engine and come back as deltas of choices: every route that generates does it through here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from model.tokenizer import Tokenizer
from server.answers import PromptTokensDetails, Usage
from server.engine.client import EngineClient
from server.engine.request import (
    EngineDeadError,
    EngineRequest,
    EngineStopped,
    Grammar,
    QueueFull,
    RequestRejected,
    SamplingParams,
)
from server.errors import APIError
from server.grounding import Span
from server.prepare import PreparedPrompt
from server.protocol import INT64_MAX, SamplingRequest
from server.streaming import AnswerDecoder, Delta, FinishReason, ScoredToken
from server.telemetry import current

# Deltas that wait for a slow reader before the choices' tasks wait with them.
QUEUED_DELTAS = 64


@dataclass(frozen=True)
class Job:
    """One choice to generate, and the decoder of its answer (good for one run)."""

    request: EngineRequest
    decoder: AnswerDecoder


@dataclass
class Answer:
    """All deltas of one choice together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    cached_tokens: int | None = None
    spans: list[Span] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.scored += delta.scored
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.spans = delta.spans
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens


def make_jobs(
    body: SamplingRequest,
    prompt: PreparedPrompt,
    tokenizer: Tokenizer,
    *,
    request_id: str,
    max_tokens: int,
    logprobs: int | None,
    vocab_size: int,
    num_choices: int = 1,
    grammar: Grammar | None = None,
) -> list[Job]:
    """The choices of one prompt. Raises APIError (400) on token ids outside the vocabulary.

    Choice i of a request with a seed has the seed + i, so that choices differ and each can be had again alone.
    """
    record = current()
    record.prompt_tokens += len(prompt.token_ids)
    record.images += len(prompt.images)
    record.tiles += sum(1 + image.columns * image.rows for image in prompt.images)
    bias = {int(token): value for token, value in body.logit_bias.items()}
    for name, ids in (("logit_bias", list(bias)), ("stop_token_ids", body.stop_token_ids)):
        for token in ids:
            if not 0 <= token < vocab_size:
                message = f"{name}: token id {token} is outside the vocabulary of {vocab_size}"
                raise APIError(400, message, param=name, code="invalid_value")
    jobs = []
    for choice in range(num_choices):
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            seed=None if body.seed is None else _wrap(body.seed + choice),
            logit_bias=bias,
            min_tokens=body.min_tokens,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            grammar=grammar,
        )
        decoder = AnswerDecoder(
            tokenizer,
            skip_special_tokens=body.skip_special_tokens,
            # Of the forms an answer may be held to, only a grammar can ask for boxes; JSON that looks like one is JSON.
            grounding=bool(prompt.image_sizes) and (grammar is None or grammar.kind == "lark"),
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            min_tokens=body.min_tokens,
        )
        request = EngineRequest(
            request_id=f"{request_id}-{choice}",
            token_ids=prompt.token_ids,
            images=prompt.images,
            sampling=sampling,
            priority=body.priority,
            cache_salt=body.cache_salt or "",
        )
        jobs.append(Job(request, decoder))
    return jobs


def _wrap(seed: int) -> int:
    """Back into the range of int64."""
    return (seed + INT64_MAX + 1) % (2 * INT64_MAX + 2) - INT64_MAX - 1


class Generation:
    """Jobs in flight. Their deltas come as the engine makes them; `close` aborts what still runs.

    Several jobs run in tasks of their own, which start at once and meet in a queue. A lone one, as most are, starts
    with the first delta that is waited for, and has neither: they take a fifth of the time that a token takes here.
    """

    def __init__(self, engine: EngineClient, jobs: Sequence[Job]) -> None:
        """Must be made on the event loop."""
        self._unfinished = len(jobs)
        self._first: tuple[int, Delta] | None = None
        self._lone = _run(engine, jobs[0]) if len(jobs) == 1 else None
        self._queue: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(QUEUED_DELTAS)
        several = [] if self._lone is not None else jobs
        self._tasks = [asyncio.create_task(self._pump(engine, index, job)) for index, job in enumerate(several)]

    async def begin(self) -> None:
        """Wait for the first delta: until then a refusal can still become an HTTP status. Closes if it fails."""
        try:
            self._first = await self._next()
        except BaseException:
            await self.close()
            raise

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Each delta with the index of its job; every job's last has a finish_reason.

        Raises APIError when the engine refuses or fails a job.
        """
        if self._first is not None:
            yield self._first
        while self._unfinished:
            yield await self._next()

    async def close(self) -> None:
        """Abort the jobs that still run, and wait until the engine knows. Nobody may be waiting for a delta."""
        if self._lone is not None:
            await self._lone.aclose()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _next(self) -> tuple[int, Delta]:
        if self._lone is not None:
            delta = await anext(self._lone)
            if delta.finish_reason is not None:
                self._unfinished = 0
                await self._lone.aclose()  # after a stop string the engine would go on
            return 0, delta
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._unfinished -= item[1].finish_reason is not None
        return item

    async def _pump(self, engine: EngineClient, index: int, job: Job) -> None:
        try:
            async with aclosing(_run(engine, job)) as deltas:
                async for delta in deltas:
                    await self._queue.put((index, delta))
        except Exception as error:
            await self._queue.put(error)


async def _run(engine: EngineClient, job: Job) -> AsyncGenerator[Delta, None]:
    """The deltas of one choice. Leaving it, for a stop string as for a lost client, aborts it in the engine."""
    run = current().start_run()
    try:
        async with aclosing(engine.generate(job.request)) as events:
            async for event in events:
                run.got(len(event.token_ids), event.queue_s)
                # The engine has the pictures by now; choices share them, and all are sent before the first event comes.
                job.request.images.clear()
                if event.unservable:
                    raise APIError(400, f"This request cannot be served: {event.error}", code="request_rejected")
                if event.finish_reason == "error":
                    message = f"The engine could not finish this request: {event.error}"
                    raise APIError(500, message, code="engine_error")
                if event.finish_reason == "abort":
                    raise APIError(503, f"The request was aborted: {event.error or 'on demand'}.", code="aborted")
                delta = job.decoder.feed(event)
                yield delta
                if delta.finish_reason is not None:
                    return
        raise APIError(500, "The engine ended this request without a result.", code="engine_error")
    except QueueFull as error:
        raise APIError(429, f"Try again later: {error}.", code="queue_full", headers={"Retry-After": "1"}) from error
    except RequestRejected as error:
        raise APIError(400, str(error), code="request_rejected") from error
    except EngineStopped as error:
        message = "The request was aborted because the server stops."
        raise APIError(503, message, code="aborted", headers={"Retry-After": "10"}) from error
    except EngineDeadError as error:
        raise engine_dead() from error


def engine_dead() -> APIError:
    """What a client is told while no engine answers."""
    return APIError(503, "The engine is not running.", code="engine_dead", headers={"Retry-After": "10"})


async def collect(engine: EngineClient, jobs: Sequence[Job]) -> list[Answer]:
    """The whole answers, in the order of the jobs."""
    answers = [Answer() for _ in jobs]
    generation = Generation(engine, jobs)
    try:
        async for index, delta in generation.deltas():
            answers[index].add(delta)
    finally:
        await generation.close()
    return answers


class Tally:
    """Counts tokens for the usage: each prompt once, however many choices it has, and every choice's own.

    `num_choices` belong to each prompt: choice i to prompt i // num_choices.
    """

    def __init__(self, prompts: Sequence[PreparedPrompt], num_choices: int) -> None:
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_choices = num_choices
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}  # by prompt

    def add(self, choice: int, piece: Delta | Answer) -> None:
        """Count a piece of a choice, or all of it."""
        self._completion_tokens += len(piece.token_ids)
        if piece.cached_tokens is not None:
            # Choices find each other's work, which was not there before the request: the least is what was.
            prompt = choice // self._num_choices
            self._cached[prompt] = min(piece.cached_tokens, self._cached.get(prompt, piece.cached_tokens))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())),
        )


def usage_of(prompts: Sequence[PreparedPrompt], num_choices: int, answers: Sequence[Answer]) -> Usage:
    """The usage of whole answers."""
    tally = Tally(prompts, num_choices)
    for choice, answer in enumerate(answers):
        tally.add(choice, answer)
    return tally.usage()
