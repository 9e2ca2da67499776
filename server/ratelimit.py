"""Limits for each client: how many of its requests run at once, and how many come in a time. Both are off by default.

A client is an API key; where none is set, an address (an IPv6 client has a network of 2^64 of them, so that counts as
one). Counts are kept in this process: behind several servers, each grants the limits.
"""

from __future__ import annotations

import ipaddress
import math
import time

from limits import parse_many
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import SlidingWindowCounterRateLimiter
from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth import CLIENT, OPEN_PATHS
from server.errors import APIError, error_response


class ClientLimits:
    """Plain ASGI middleware that answers a client over its limits with a 429 that says when to come again."""

    def __init__(self, app: ASGIApp, *, rate: str | None, at_once: int | None) -> None:
        self.app = app
        self._rates = [] if rate is None else parse_many(rate)
        self._at_once = math.inf if at_once is None else at_once
        self._window = SlidingWindowCounterRateLimiter(MemoryStorage())
        self._running: dict[str, int] = {}  # of clients that have a request now, and of no others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        client = _client(scope)
        running = self._running.get(client, 0)
        if running >= self._at_once:
            message = f"{running} of your requests are running, and no more are allowed at once."
            await error_response(_too_many(message, 1))(scope, receive, send)
            return
        self._running[client] = running + 1
        try:
            error = await self._over_rate(client)
            await (self.app if error is None else error_response(error))(scope, receive, send)
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    async def _over_rate(self, client: str) -> APIError | None:
        """Count the request. A refused one counts for the rates that it kept."""
        for rate in self._rates:
            if not await self._window.hit(rate, client):
                stats = await self._window.get_window_stats(rate, client)
                wait = max(1, math.ceil(stats.reset_time - time.time()))
                return _too_many(f"Your requests are over the limit of {rate}.", wait)
        return None


def _client(scope: Scope) -> str:
    if CLIENT in scope:
        return str(scope[CLIENT])
    host = scope["client"][0] if scope.get("client") else "unknown"
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # a Unix socket has none
        return str(host)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _too_many(message: str, wait_s: int) -> APIError:
    return APIError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(wait_s)})
