"""Plain ASGI middleware around the application: request ids with the access log, and the limit on bodies.

None of them wraps the response in a task of its own, so a route's poll for the client's disconnect works.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import APIError

logger = logging.getLogger(__name__)

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
# A client that is still sending reads no answer, so the rest of a body over the limit is read and dropped, up to here.
DRAIN_BYTES = 256 << 20


class RequestId:
    """Give each request an id (the client's X-Request-ID if it is a plain word), answer with it, and log one line.

    The line has the method, path, status and time: never a query, a header or a body.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given.decode() if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        began = time.perf_counter()
        try:
            await self.app(scope, receive, send_with_id)
        finally:
            milliseconds = 1000 * (time.perf_counter() - began)
            logger.info("%s %r %d %.0f ms id=%s", scope["method"], scope["path"], status, milliseconds, request_id)


class BodyLimit:
    """Refuse bodies over the limit with a 413, by their declared length or, when chunked, by counting."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        too_long = declared.isdigit() and int(declared) > self._max_bytes
        asks_first = headers.get(b"expect", b"").lower() == b"100-continue"
        seen = 0

        async def limited() -> Message:
            nonlocal seen
            if too_long and asks_first:
                raise self._error()
            message = await receive()
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                if too_long or seen > self._max_bytes:
                    while message.get("more_body", False) and seen < DRAIN_BYTES:
                        message = await receive()
                        seen += len(message.get("body", b""))
                    raise self._error()
            return message

        await self.app(scope, limited, send)

    def _error(self) -> APIError:
        return APIError(
            413, f"The request body is over the limit of {self._max_bytes} bytes.", code="request_too_large"
        )
