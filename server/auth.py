"""API keys: every route but /health and /ready wants `Authorization: Bearer <key>` once a key is set."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import APIError, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})


class KeyAuth:
    """Plain ASGI middleware that refuses requests without one of the keys, before their body is read."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        error = APIError(
            401,
            "Missing or wrong API key. Send it as the header `Authorization: Bearer <key>`.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error_response(error)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        """Whether the request has a key. Bytes are compared, so any header is safe; every key costs the same time."""
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, token = values[0].partition(b" ")
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)
