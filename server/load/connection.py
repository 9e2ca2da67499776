"""One connection to a server, made to cost little: what comes is noted with its time, and read when nobody waits.

A general HTTP client takes 170 us of processor time for each event: at a few thousand tokens a second it would be what
is measured. This takes a third of that.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools
import httpx

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Target:
    """Where requests go: a server's base URL, with or without `/v1`, and what it wants as Authorization."""

    base_url: str
    authorization: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError when the URL is none of http or https."""
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{self.base_url!r} is not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"{self.base_url!r} is not an http or https URL")

    @property
    def url(self) -> httpx.URL:
        return httpx.URL(self.base_url.rstrip("/").removesuffix("/v1"))

    def head(self, length: int) -> bytes:
        """The head of a POST for a chat completion whose body has so many bytes."""
        lines = [
            f"POST {self.url.raw_path.decode().rstrip('/')}/v1/chat/completions HTTP/1.1",
            f"Host: {self.url.netloc.decode()}",
            "Content-Type: application/json",
            f"Content-Length: {length}",
        ]
        if self.authorization is not None:
            lines.append(f"Authorization: {self.authorization}")
        return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Reply:
    """What came of one request. Times are of time.perf_counter(), in seconds.

    Args:
        sent: when its first byte was handed to the connection.
        ended: when the last byte came, or the failure.
        status: of the HTTP answer, 0 when none came.
        pieces: parts of the body with the time of each.
        failure: why the answer is not whole, None when it is.
    """

    sent: float
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None


class Connection:
    """A kept-alive connection for one request at a time; it opens, and opens again, when it has to."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._protocol: _Protocol | None = None

    async def ask(self, body: Sequence[bytes], heard: asyncio.Event | None = None) -> Reply:
        """Send a body (in parts) and take in the whole answer. Failures are noted in the reply, never raised.

        `heard` is set when the answer has begun to come.
        """
        reply = Reply(sent=time.perf_counter())
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                protocol = await self._open()
        except OSError as error:  # TimeoutError is one, too
            reply.failure = f"cannot connect: {type(error).__name__}"
        else:
            head = self._target.head(sum(map(len, body)))
            reply.sent = time.perf_counter()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await protocol.exchange([head, *body], reply, heard)
            except TimeoutError:
                reply.failure = "timeout"
        reply.ended = time.perf_counter()
        if reply.failure is not None:
            self.close()
        return reply

    def close(self) -> None:
        """Hang up, also in the middle of an answer."""
        if self._protocol is not None:
            self._protocol.close()
            self._protocol = None

    async def _open(self) -> _Protocol:
        if self._protocol is None or self._protocol.is_closed:
            url = self._target.url
            secure = url.scheme == "https"
            _, self._protocol = await asyncio.get_running_loop().create_connection(
                _Protocol,
                url.host,
                url.port or (443 if secure else 80),
                ssl=ssl.create_default_context() if secure else None,
            )
        return self._protocol


class _Protocol(asyncio.Protocol):
    """HTTP/1.1 of one connection: httptools takes the framing off."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reply: Reply | None = None
        self._heard: asyncio.Event | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, parts: Sequence[bytes], reply: Reply, heard: asyncio.Event | None) -> None:
        """Send a request and wait for the end of its answer, which goes into `reply` as it comes."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._heard = reply, heard
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(parts)
        await self._done

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.close()  # an answer to nothing
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"not HTTP: {type(error).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("connection lost")

    # httptools's side

    def on_body(self, body: bytes) -> None:
        assert self._reply is not None
        self._reply.pieces.append((self._now, body))
        if self._heard is not None:
            self._heard.set()

    def on_message_complete(self) -> None:
        assert self._parser is not None and self._reply is not None
        self._reply.status = self._parser.get_status_code()
        keep = self._parser.should_keep_alive()
        self._end(None)
        if not keep:
            self.close()

    def _end(self, failure: str | None) -> None:
        if self._done is None or self._done.done():
            return
        assert self._reply is not None
        self._reply.failure = failure
        self._parser = None
        self._done.set_result(None)
