"""What came over a connection, read as a streamed chat completion: when each token was there, or what went wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from server.load.connection import Reply


@dataclass(frozen=True)
class Answer:
    """One whole answer. Times in seconds, as in `Reply`.

    Args:
        sent: when the request was sent.
        ended: when the stream ended.
        times: when each event with text came; the first is the first token's. An answer without any text has the time
            of the first event of a choice alone.
        tokens: how many were generated.
        counted: whether the server said so (`usage`); else `tokens` is the number of events with text.
        prompt_tokens, cached_tokens: as the server said, None if it did not.
    """

    sent: float
    ended: float
    times: tuple[float, ...]
    tokens: int
    counted: bool
    prompt_tokens: int | None = None
    cached_tokens: int | None = None

    @property
    def first_token_s(self) -> float:
        """Time to first token."""
        return self.times[0] - self.sent

    @property
    def token_s(self) -> float | None:
        """Time per output token after the first, None when there is none."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between events that follow each other."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def total_s(self) -> float:
        return self.ended - self.sent


def read_answer(reply: Reply) -> Answer | str:
    """The answer, or in a few words of what kind the failure is."""
    if reply.status not in (0, 200):
        return _kind_of_refusal(reply)
    times: list[float] = []
    first_choice: float | None = None
    usage: dict[str, Any] = {}
    whole = False
    try:
        for time, data in _events(reply):
            if data == b"[DONE]":
                whole = True
                continue
            chunk = json.loads(data)
            if chunk.get("error"):
                return f"error in the stream: {chunk['error'].get('code') or chunk['error'].get('type')}"
            usage = chunk.get("usage") or usage
            if chunk["choices"]:
                first_choice = first_choice or time
            if _has_text(chunk):
                times.append(time)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "not a stream of chat completion chunks"
    if reply.failure is not None:
        return f"{reply.failure} after {'some' if times else 'no'} tokens" if reply.pieces else reply.failure
    if not whole:
        return "the stream ended without [DONE]"
    if first_choice is None:
        return "an answer without a choice"
    counted = isinstance(usage.get("completion_tokens"), int)
    return Answer(
        sent=reply.sent,
        ended=reply.ended,
        times=tuple(times) or (first_choice,),
        tokens=usage["completion_tokens"] if counted else len(times),
        counted=counted,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    )


def text_times(reply: Reply) -> list[float]:
    """When each event with text came, of an answer that need not be whole. Raises what a malformed one makes raise."""
    return [time for time, data in _events(reply) if data != b"[DONE]" and _has_text(json.loads(data))]


def _has_text(chunk: dict[str, Any]) -> bool:
    return any(choice["delta"].get("content") for choice in chunk["choices"])


def _events(reply: Reply) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time when its end came. Events in other fields are left out."""
    rest = b""
    for time, piece in reply.pieces:
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield time, line[5:].strip()


def _kind_of_refusal(reply: Reply) -> str:
    """The status, and the code that OpenAI's errors have beside it."""
    try:
        error = json.loads(b"".join(piece for _, piece in reply.pieces))["error"]
        detail = error.get("code") or error.get("type") or ""
    except (ValueError, KeyError, TypeError, AttributeError):
        detail = ""
    return f"status {reply.status} {detail}".rstrip()
