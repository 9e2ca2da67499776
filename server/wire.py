"""The HTTP/1.1 connection: uvicorn's, which takes a head of any length and waits for it for ever, with limits.

The application sees a request once its head is whole. What comes before that, a client that sends nothing, one byte a
second, or headers without end, is cut off here: with a 408 or 431 where a request has begun, else without a word.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from server.errors import APIError
from server.settings import Settings

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

# How long what a refused client goes on to send is dropped.
LINGER_S = 1.0


class PatientProtocol(HttpToolsProtocol):
    """`timeout_s` for each head, from the moment when the connection has nothing else to do; so many bytes at most."""

    timeout_s: float
    max_head_bytes: int

    _refused = False
    _answering: RequestResponseCycle | None = None
    _deadline: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn tells the last request of a pipeline alone, and this one would be answered to nobody.
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(431, "The request's headers are too long.", "headers_too_large")
                return
        if self._is_idle:
            self._expect_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered: what comes can only be a new head, or the rest of an unwanted body."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_s, self._out_of_patience)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _out_of_patience(self) -> None:
        self._deadline = None
        if self._refused or self.transport.is_closing() or not self._is_idle:
            return
        if self._in_head:
            self._refuse(408, "The request's head came too slowly.", "request_timeout")
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is not HTTP, in the form of our errors."""
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer before there is a request, and hang up.

        What still comes is dropped for a moment: closing at once would reset the connection, and with it this answer.
        """
        if not self._is_idle:  # it would stand in the middle of the answer to the request before
            self.transport.close()
            return
        self._refused = True
        body = json.dumps(APIError(status, message, code=code).body()).encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-content-type-options: nosniff\r\ncache-control: no-store\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


_REASONS = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


def protocol_for(settings: Settings) -> type[asyncio.Protocol]:
    """The protocol with the limits of these settings, as uvicorn wants it: a class."""

    class Protocol(PatientProtocol):
        timeout_s = settings.read_timeout
        max_head_bytes = settings.max_header_bytes + settings.max_header_bytes // 4 + 8192  # punctuation, and the URL

    return Protocol
