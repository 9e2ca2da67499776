"""Limits for each client."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth import KeyAuth, KeyRing
from server.ratelimit import ClientLimits, _client
from tests.server.test_middleware import call, echo_app


def of_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_rate_of_each_key() -> None:
    app = KeyAuth(ClientLimits(echo_app(), rate="3/hour", at_once=None), KeyRing(["one", "two"]))
    assert [call(app, "POST", "/length", headers=of_key("one")).status_code for _ in range(4)] == [200] * 3 + [429]
    refused = call(app, "POST", "/length", headers=of_key("one"))
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "3 per 1 hour" in error["message"]
    assert call(app, "POST", "/length", headers=of_key("two")).status_code == 200
    assert call(app, "POST", "/length", headers=of_key("wrong")).status_code == 401


def test_several_rates_and_open_routes() -> None:
    app = ClientLimits(echo_app(), rate="100/minute;2/day", at_once=None)
    assert [call(app, "POST", "/length").status_code for _ in range(3)] == [200, 200, 429]
    assert call(app, "GET", "/health").status_code == 200


class Waits:
    """An application whose answers wait for a signal."""

    def __init__(self) -> None:
        self.signal = asyncio.Event()
        self.fails = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.signal.wait()
        if self.fails:
            raise RuntimeError
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})


def test_requests_at_once_of_each_client() -> None:
    async def run() -> None:
        inner = Waits()
        limits = ClientLimits(inner, rate=None, at_once=2)

        async def get(client: str) -> int:
            transport = httpx.ASGITransport(_ignoring_errors(limits), client=(client, 1))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return (await http.get("/")).status_code

        first = [asyncio.create_task(get("192.0.2.1")) for _ in range(2)]
        await asyncio.sleep(0)
        while len(limits._running) == 0 or limits._running["192.0.2.1"] < 2:
            await asyncio.sleep(0.001)
        assert await get("192.0.2.1") == 429
        other = asyncio.create_task(get("192.0.2.2"))
        await asyncio.sleep(0.01)
        first[0].cancel()  # its client leaves
        await asyncio.gather(first[0], return_exceptions=True)
        again = asyncio.create_task(get("192.0.2.1"))
        await asyncio.sleep(0.01)
        inner.signal.set()
        assert list(await asyncio.gather(first[1], other, again)) == [200] * 3
        inner.fails = True
        assert await get("192.0.2.1") == 500
        assert not limits._running

    asyncio.run(run())


def _ignoring_errors(app: ASGIApp) -> ASGIApp:
    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except RuntimeError:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body"})

    return wrapped


def test_who_counts_as_one_client() -> None:
    def client(host: Any) -> str:
        return _client({"client": None if host is None else (host, 1)})

    assert client("2001:db8::1") == client("2001:db8::ffff:1") != client("2001:db8:0:1::1")
    assert client("192.0.2.1") != client("192.0.2.2")
    assert client("::ffff:192.0.2.1") != client("::ffff:192.0.2.2")
    assert client(None) == client("unknown")
