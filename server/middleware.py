"""Plain ASGI middleware around the application: ids, headers, limits on a request's head and body, and a last net.

None of them wraps the response in a task of its own, so a route's poll for the client's disconnect works.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import APIError, error_response, internal_error
from server.logs import stack_of
from server.telemetry import Record, recording

logger = logging.getLogger(__name__)

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# A client that is still sending reads no answer, so the rest of a body over the limit is read and dropped, up to here.
DRAIN_BYTES = 256 << 20
# Path and query together. The longest that a client has reason to send is a model's name.
MAX_URL_BYTES = 8 << 10
# Each header counts as so many bytes more, as in HTTP/2: that is about what keeping a short one takes.
HEADER_COST = 32
# Slower than this on the average, and a body counts as stalled: 32 MiB may take half an hour.
MIN_BYTES_PER_S = 16 << 10

_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
}


class Observe:
    """Give each request an id (the client's X-Request-ID if it is a plain word) and a record; answer with the id.

    Once the answer is out, however it ended, the observers get the record.
    """

    def __init__(self, app: ASGIApp, observers: Sequence[Callable[[Record], None]]) -> None:
        self.app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode() if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        record = Record(request_id, scope["method"], scope["path"], headers=scope["headers"])

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            with recording(record):
                await self.app(scope, receive, send_with_id)
        finally:
            record.end(route=scope.get("route"))
            for observe in self._observers:
                observe(record)


class SecurityHeaders:
    """Headers that keep browsers from guessing types, framing pages and storing answers. A route's own go first."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class LastNet:
    """Any exception becomes a plain 500, and its stack goes to the log without its message, which may quote a prompt.

    Within the other middleware, so that this answer has an id and headers, too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def send_and_see(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, send_and_see)
        except Exception as error:
            logger.error("a request failed with an exception that nothing foresaw\n%s", stack_of(error))
            if started:
                # Only a broken connection tells the client that the answer is not whole.
                raise RuntimeError("an answer broke off") from None
            await error_response(internal_error())(scope, receive, send)


class HeadLimit:
    """Refuse URLs and headers that are longer than anything a client has reason to send."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._judge(scope) if scope["type"] == "http" else None
        await (self.app if error is None else error_response(error))(scope, receive, send)

    def _judge(self, scope: Scope) -> APIError | None:
        url = len(scope.get("raw_path") or scope["path"].encode()) + len(scope["query_string"])
        if url > MAX_URL_BYTES:
            return APIError(414, f"The URL is over the limit of {MAX_URL_BYTES} bytes.", code="url_too_long")
        if sum(len(name) + len(value) + HEADER_COST for name, value in scope["headers"]) > self._max_bytes:
            return APIError(
                431, f"The headers are over the limit of {self._max_bytes} bytes.", code="headers_too_large"
            )
        return None


class BodyLimit:
    """Refuse bodies over the limit with a 413, by their declared length or, when chunked, by counting.

    A body must come within `patience_s` and the time that it takes at MIN_BYTES_PER_S; one that does not is a 408.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, patience_s: float) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        too_long = declared.isdigit() and int(declared[:20]) > self._max_bytes
        asks_first = headers.get(b"expect", b"").lower() == b"100-continue"
        seen = 0
        whole = False
        began: float | None = None

        async def timely() -> Message:
            nonlocal seen, whole, began
            if whole:  # what still can come is the client's disconnect, and that may take its time
                return await receive()
            now = asyncio.get_running_loop().time()
            began = now if began is None else began
            try:
                async with asyncio.timeout_at(began + self._patience_s + seen / MIN_BYTES_PER_S):
                    message = await receive()
            except TimeoutError:
                headers = {"Connection": "close"}
                error = APIError(408, "The request's body came too slowly.", code="request_timeout", headers=headers)
                raise error from None
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            return message

        async def limited() -> Message:
            if too_long and asks_first:
                raise self._error()
            message = await timely()
            if message["type"] == "http.request" and (too_long or seen > self._max_bytes):
                while not whole and seen < DRAIN_BYTES:
                    await timely()
                raise self._error()
            return message

        await self.app(scope, limited, send)

    def _error(self) -> APIError:
        return APIError(
            413, f"The request body is over the limit of {self._max_bytes} bytes.", code="request_too_large"
        )
