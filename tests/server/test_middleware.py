"""API keys, body limit and request ids, each around a tiny application."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import ASGIApp, Message

from server.accesslog import log_request
from server.auth import KeyAuth, KeyRing
from server.errors import install_handlers
from server.middleware import BodyLimit, HeadLimit, LastNet, Observe, SecurityHeaders
from server.telemetry import Record

LIMIT = 1000
PATIENCE_S = 60.0
SECRET = "a secret of the server"


def echo_app() -> FastAPI:
    """Answers with the length of the body."""
    app = FastAPI()
    install_handlers(app)

    @app.post("/length")
    async def length(request: Request) -> int:
        return len(await request.body())

    @app.get("/health")
    async def health() -> str:
        return "ok"

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError(SECRET)

    app.add_middleware(BodyLimit, max_bytes=LIMIT, patience_s=PATIENCE_S)
    app.add_middleware(LastNet)
    return app


def call(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("header", [b"Bearer one", b"bearer one", b"BEARER two"])
def test_a_right_key_in_any_case_of_the_scheme(header: bytes) -> None:
    app = KeyAuth(echo_app(), KeyRing(["one", "two"]))
    assert call(app, "POST", "/length", headers={"Authorization": header}).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"Bearer wrong",
        b"Bearer",
        b"Bearer ",
        b"one",
        b"Basic one",
        b"Bearer ONE",
        b"Bearer one two",
        b"Bearer  one",
        b"Bearer one,two",
        "Bearer é".encode(),
        b"Bearer \xff\xfe",
    ],
)
def test_a_wrong_key(header: bytes | None) -> None:
    app = KeyAuth(echo_app(), KeyRing(["one", "two"]))
    response = call(app, "POST", "/length", headers={} if header is None else {"Authorization": header})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_two_authorization_headers_are_refused() -> None:
    app = KeyAuth(echo_app(), KeyRing(["one"]))
    headers = [("Authorization", "Bearer one"), ("Authorization", "Bearer other")]
    assert call(app, "POST", "/length", headers=headers).status_code == 401


def test_health_is_open_and_so_is_all_without_keys() -> None:
    assert call(KeyAuth(echo_app(), KeyRing(["one"])), "GET", "/health").status_code == 200
    assert call(KeyAuth(echo_app(), KeyRing([])), "POST", "/length").status_code == 200
    assert call(KeyAuth(echo_app(), KeyRing(["one"])), "GET", "/no-such-route").status_code == 401


def test_a_key_beyond_ascii() -> None:
    header = {"Authorization": "Bearer clé".encode()}
    assert call(KeyAuth(echo_app(), KeyRing(["clé"])), "POST", "/length", headers=header).status_code == 200


async def _chunks(total: int) -> AsyncIterator[bytes]:
    for _ in range(0, total, 100):
        yield b"x" * 100


@pytest.mark.parametrize(("length", "status"), [(LIMIT, 200), (LIMIT + 100, 413), (50 * LIMIT, 413)])
def test_body_limit_declared_and_chunked(length: int, status: int) -> None:
    for body in (b"x" * length, _chunks(length)):
        response = call(echo_app(), "POST", "/length", content=body)
        assert response.status_code == status
        if status == 413:
            assert response.json()["error"]["code"] == "request_too_large"
            assert str(LIMIT) in response.json()["error"]["message"]


def test_a_client_that_asks_first_need_not_send_a_long_body() -> None:
    headers = {"Expect": "100-continue"}
    response = call(echo_app(), "POST", "/length", content=b"x" * 5000, headers=headers)
    assert response.status_code == 413


def test_request_ids(caplog: pytest.LogCaptureFixture) -> None:
    app = Observe(echo_app(), [log_request])
    assert call(app, "GET", "/health", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    forged = call(app, "GET", "/health", headers={"X-Request-ID": "a b"}).headers["x-request-id"]
    assert forged != "a b" and len(forged) == 32
    with caplog.at_level(logging.INFO, logger="server.accesslog"):
        call(app, "GET", "/health?secret=1", headers={"X-Request-ID": "mine-2"})
        call(app, "GET", "/a%0Ab")
    assert "GET '/health' 200" in caplog.text and "id=mine-2" in caplog.text
    assert "secret" not in caplog.text
    assert "a\\nb" in caplog.text  # a line feed in a path begins no line of its own


def test_errors_have_one_form() -> None:
    cases = [("GET", "/nowhere", 404), ("GET", "/length", 405), ("GET", "/broken", 500)]
    for method, path, status in cases:
        response = call(echo_app(), method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert SECRET not in response.text


def test_an_unforeseen_exception_has_its_stack_in_the_log_and_nothing_of_what_it_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records: list[Record] = []
    response = call(Observe(SecurityHeaders(echo_app()), [records.append]), "GET", "/broken")
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] == records[0].request_id
    assert response.headers["x-content-type-options"] == "nosniff"
    assert (records[0].route, records[0].outcome) == ("/broken", "5xx")
    assert "RuntimeError" in caplog.text and "in broken" in caplog.text
    assert SECRET not in caplog.text


def test_security_headers_and_what_a_route_says_itself() -> None:
    app = FastAPI()

    @app.get("/own")
    async def own() -> Response:
        return Response("x", headers={"Cache-Control": "max-age=60"})

    headers = call(SecurityHeaders(app), "GET", "/own").headers
    assert headers["cache-control"] == "max-age=60"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["referrer-policy"] == "no-referrer"
    assert call(SecurityHeaders(app), "GET", "/no").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/health", {"X-A": "a" * 500}, 200),
        ("/health", {"X-A": "a" * 2000}, 431),
        ("/health", {f"X-{number}": "a" * 100 for number in range(20)}, 431),
        ("/" + "a" * 9000, {}, 414),
        ("/health?" + "a" * 9000, {}, 414),
    ],
)
def test_long_heads(path: str, headers: dict[str, str], status: int) -> None:
    response = call(HeadLimit(echo_app(), max_bytes=1000), "GET", path, headers=headers)
    assert response.status_code == status
    if status != 200:
        assert response.json()["error"]["code"] in ("headers_too_large", "url_too_long")


@pytest.mark.parametrize("piece", [b"", b"x"], ids=["stalls", "drips"])
def test_a_body_that_does_not_come(piece: bytes) -> None:
    async def body() -> AsyncIterator[bytes]:
        while True:
            yield piece
            await asyncio.sleep(0.005)

    app = BodyLimit(echo_app(), max_bytes=10**6, patience_s=0.05)
    scope = {"type": "http", "method": "POST", "path": "/length", "raw_path": b"/length", "query_string": b""}
    pieces = body()
    sent: list[Message] = []

    async def receive() -> Message:
        if not piece:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": await anext(pieces), "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app({**scope, "headers": [], "server": None, "client": None}, receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"


def test_a_route_may_take_longer_than_a_body_may() -> None:
    app = FastAPI()

    @app.post("/slow")
    async def slow(request: Request) -> int:
        await request.body()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(request.receive(), 0.2)  # what a poll for the disconnect does
        return 1

    response = call(BodyLimit(app, max_bytes=LIMIT, patience_s=0.05), "POST", "/slow", content=b"x")
    assert response.status_code == 200
