"""What one request did, noted on its way and told once at its end: to the log, the metrics and the traces.

The record of the request being served is found through `current()`. Where none is, as in a test or a command, there is
one that nobody reads, so that no caller has to ask. Records hold numbers and times: never text, pictures or keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

from server.errors import CLIENT_CLOSED_REQUEST

P = ParamSpec("P")
T = TypeVar("T")

Outcome = Literal["1xx", "2xx", "3xx", "4xx", "5xx", "broken", "aborted"]


@dataclass(frozen=True)
class Phase:
    """A named part of a request's time, in seconds of the clock that `Record.began` has."""

    name: str
    began: float
    ended: float


@dataclass
class Run:
    """The way of one choice through the engine. Times are seconds of `time.monotonic`."""

    submitted: float = field(default_factory=time.monotonic)
    queue_s: float = 0.0  # until the engine began with it
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0

    def got(self, num_tokens: int, queue_s: float | None) -> None:
        """Note an event of the engine with so many tokens; its first says how long the request was queued."""
        if queue_s is not None:
            self.queue_s = queue_s
        if num_tokens:
            now = time.monotonic()
            self.first_token = now if self.first_token is None else self.first_token
            self.last_token = now
            self.num_tokens += num_tokens


@dataclass
class Record:
    """One request. `route` is the template of its route, once it has found one."""

    request_id: str
    method: str
    path: str
    headers: Sequence[tuple[bytes, bytes]] = ()
    began: float = field(default_factory=time.monotonic)
    began_unix: float = field(default_factory=time.time)
    ended: float = 0.0
    status: int = 0  # 0: the client left before there was one
    route: str | None = None
    broken: bool = False  # the answer ended with an error after its status was out
    aborted: bool = False  # the client left before the end
    prompt_tokens: int = 0
    images: int = 0
    tiles: int = 0
    phases: list[Phase] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def end(self, route: object) -> None:
        """The answer is out, or there will be none. `route` is what the router chose, if it came to that."""
        self.ended = time.monotonic()
        path = getattr(route, "path", None)
        self.route = path if isinstance(path, str) else None
        self.aborted = self.aborted or self.status in (0, CLIENT_CLOSED_REQUEST)

    @property
    def outcome(self) -> Outcome:
        """How it ended, in one of a few words."""
        if self.aborted:
            return "aborted"
        if self.broken:
            return "broken"
        classes: tuple[Outcome, ...] = ("1xx", "2xx", "3xx", "4xx", "5xx")
        return classes[self.status // 100 - 1]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def completion_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note the time that the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases.append(Phase(name, began, time.monotonic()))

    def engine_phases(self) -> list[Phase]:
        """Queue, prefill and decode over all choices: from the first that enters each to the last token of any."""
        began = [run for run in self.runs if run.first_token is not None]
        if not began:
            return []
        submitted = min(run.submitted for run in began)
        admitted = min(run.submitted + run.queue_s for run in began)
        first = min(run.first_token for run in began if run.first_token is not None)
        last = max(run.last_token for run in began if run.last_token is not None)
        # The engine's clock is the same, but its message takes a moment: no phase ends before it begins.
        admitted = min(admitted, first)
        return [Phase("queue", submitted, admitted), Phase("prefill", admitted, first), Phase("decode", first, last)]

    def start_run(self) -> Run:
        """A choice goes to the engine."""
        run = Run()
        self.runs.append(run)
        return run


_current: ContextVar[Record | None] = ContextVar("vl2_record", default=None)


def current() -> Record:
    """The record of the request that is being served."""
    record = _current.get()
    return Record("", "", "") if record is None else record


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Within the block, and in the tasks and threads it starts with its context, `current()` is this record."""
    token = _current.set(record)
    try:
        yield
    finally:
        _current.reset(token)


def timed(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: the function's time is a phase of the request it works for."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            with current().phase(name):
                return function(*args, **kwargs)

        return wrapped

    return decorate
