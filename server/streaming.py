"""Token events become text: UTF-8 that is never split, stop strings that never leak, and server-sent events.

One decoder serves streamed and whole answers, so the joined deltas of a stream are the text of the whole answer.

Which tokens become text:

* The end-of-sentence token never does, nor does the stop token that ended the answer.
* Other special tokens are hidden, or shown with `skip_special_tokens: false`.
* With `grounding`, which conversations with pictures have, a reader sees the grounding markers: it takes the markup out
  of the text that people read, and collects it as data. With `skip_special_tokens: false` the text keeps its markup.

Stop strings are looked for in the text that is shown. Log probabilities are those of every token that made the text,
markup that was taken out of it included.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from model.tokenizer import Tokenizer
from server.engine.request import TokenEvent, TokenLogprobs
from server.errors import APIError, ClientGone, internal_error
from server.grounding import MarkupReader, Span
from server.logs import stack_of
from server.telemetry import current

logger = logging.getLogger(__name__)

# How long one write may wait for a client that does not read what it asked for.
WRITE_TIMEOUT_S = 60.0

FinishReason = Literal["stop", "length"]
T = TypeVar("T")


@dataclass(frozen=True)
class ScoredToken:
    """A token that became text, with its log probabilities; `offset` is where its text begins, in characters."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


@dataclass
class Delta:
    """What one event added to an answer. `token_ids` has every sampled token, those without text included."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int | None = None  # of the prompt, known with the first token
    spans: list[Span] = field(default_factory=list)  # of the whole answer, with the finish_reason


class StopMatcher:
    """Passes text through up to the first stop string, holding back an end that may turn out to begin one.

    The match that *ends* first wins (of several that end together, the one that begins first), so that the result does
    not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that is now certain. After a match (`matched`) nothing more comes out."""
        if self.matched:
            return ""
        if not self._stop:
            return text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            certain, self._held = self._held[: min(found)[1]], ""
            return certain
        keep = self._undecided()
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def flush(self) -> str:
        """The text that was held back, once no more can come."""
        certain, self._held = self._held, ""
        return certain

    def _undecided(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0


class AnswerDecoder:
    """The text of one answer, from its token events.

    Args:
        skip_special_tokens: whether special tokens have no text.
        grounding: whether to read boxes out of the text.
        stop: stop strings; none is looked for before `min_tokens` tokens.
        stop_token_ids: tokens that end the answer without being part of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        grounding: bool = False,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._reader = MarkupReader() if grounding else None
        self._markers = frozenset(tokenizer.grounding_token_ids.values()) if grounding else frozenset()
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop)
        self._num_tokens = 0
        self._decoded = 0  # characters of the shown text so far, held back or not
        self._released = 0  # characters that were handed on
        self._pending: list[ScoredToken] = []  # tokens whose text is not handed on yet

    def feed(self, event: TokenEvent) -> Delta:
        """What the event adds. After a delta with a finish_reason nothing may be fed."""
        delta = Delta(cached_tokens=event.cached_tokens)
        last = len(event.token_ids) - 1
        for place, token in enumerate(event.token_ids):
            ends = place == last and event.finish_reason == "stop" and token in self._stop_token_ids
            logprobs = event.logprobs[place] if event.logprobs is not None else None
            self._add_token(delta, token, logprobs, hidden=ends)
            if self._matcher.matched:
                return self._finish(delta, "stop")
        if event.finish_reason in ("stop", "length"):
            self._add_text(delta, self._read(self._utf8.decode(b"", final=True), final=True))
            if self._matcher.matched:
                return self._finish(delta, "stop")
            self._release(delta, self._matcher.flush())
            delta.scored += self._pending
            return self._finish(delta, "stop" if event.finish_reason == "stop" else "length")
        return delta

    def _finish(self, delta: Delta, reason: FinishReason) -> Delta:
        delta.finish_reason = reason
        if self._reader is not None:
            delta.spans = self._reader.spans
        return delta

    def _add_token(self, delta: Delta, token: int, logprobs: TokenLogprobs | None, *, hidden: bool) -> None:
        delta.token_ids.append(token)
        self._num_tokens += 1
        raw = b"" if hidden else self._bytes(token)
        if raw and logprobs is not None:
            self._pending.append(ScoredToken(token, self._decoded, logprobs))
        self._add_text(delta, self._read(self._utf8.decode(raw)))

    def _bytes(self, token: int) -> bytes:
        """What a token adds to the answer, markup included."""
        if token == self._tokenizer.eos_token_id:
            return b""
        if self._skip_special_tokens and self._tokenizer.is_special(token) and token not in self._markers:
            return b""
        return self._tokenizer.token_bytes(token)

    def _read(self, text: str, *, final: bool = False) -> str:
        """The text to show, once the markup in it is noted."""
        if self._reader is None:
            return text
        readable = self._reader.feed(text) + (self._reader.finish() if final else "")
        return readable if self._skip_special_tokens else text

    def _add_text(self, delta: Delta, text: str) -> None:
        self._decoded += len(text)
        if self._num_tokens < self._min_tokens:
            self._release(delta, text)
        else:
            self._release(delta, self._matcher.push(text))

    def _release(self, delta: Delta, text: str) -> None:
        """Hand on text, and with it the tokens that begin in it. Tokens that begin in a stop string never are."""
        delta.text += text
        self._released += len(text)
        while self._pending and self._pending[0].offset < self._released:
            delta.scored.append(self._pending.pop(0))


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and waited for when the client closes the connection.

    The request's body must have been read: what `receive` brings after it is the disconnect alone.
    Raises ClientGone after a disconnect.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task, gone)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have cleaned up; their results and failures are nobody's business any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def frame(payload: str, event: str | None = None) -> str:
    """One server-sent event; `payload` is one line."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {payload}\n\n"


DONE = frame("[DONE]")


class EventStream(Response):
    """Server-sent events (see `frame`), one write each, then `end`. A failure becomes an error event in its place.

    `close` is called when the stream is over, however it ends: a client that leaves is noticed at once, one that stops
    reading when a write has waited for WRITE_TIMEOUT_S.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[str, None], close: Callable[[], Awaitable[None]], *, end: str = DONE
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._end = end
        self._writing_since: float | None = None  # of time.monotonic(), while a write waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        stuck = asyncio.ensure_future(self._stuck())
        try:
            await asyncio.wait({writing, gone, stuck}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
            else:
                current().aborted = True
                if not gone.done():
                    logger.warning("a stream was cut off: its client does not read")
        finally:
            await _cancel(writing, gone, stuck)
            await self._close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._all_events():
            self._writing_since = time.monotonic()
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            self._writing_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stuck(self) -> None:
        """Return once a write has waited for too long. (A timer for each write would take longer than the write.)"""
        while True:
            since = self._writing_since
            left = WRITE_TIMEOUT_S if since is None else since + WRITE_TIMEOUT_S - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(left)

    async def _all_events(self) -> AsyncGenerator[str, None]:
        try:
            async for event in self._events:
                yield event
            yield self._end
        except APIError as error:
            current().broken = True
            yield frame(json.dumps(error.body()))
        except Exception as error:
            current().broken = True
            logger.error("a stream failed\n%s", stack_of(error))
            yield frame(json.dumps(internal_error().body()))


def json_response(model: BaseModel) -> Response:
    """A whole answer as JSON."""
    return Response(model.model_dump_json(), media_type="application/json")
