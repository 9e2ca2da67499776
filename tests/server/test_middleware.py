"""API keys, body limit and request ids, each around a tiny application."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import ASGIApp

from server.auth import KeyAuth
from server.errors import install_handlers
from server.middleware import BodyLimit, RequestId

LIMIT = 1000


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
        raise RuntimeError("a secret of the server")

    app.add_middleware(BodyLimit, max_bytes=LIMIT)
    return app


def call(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


@pytest.mark.parametrize("header", [b"Bearer one", b"bearer one", b"BEARER two"])
def test_a_right_key_in_any_case_of_the_scheme(header: bytes) -> None:
    app = KeyAuth(echo_app(), ["one", "two"])
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
    app = KeyAuth(echo_app(), ["one", "two"])
    response = call(app, "POST", "/length", headers={} if header is None else {"Authorization": header})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_two_authorization_headers_are_refused() -> None:
    app = KeyAuth(echo_app(), ["one"])
    headers = [("Authorization", "Bearer one"), ("Authorization", "Bearer other")]
    assert call(app, "POST", "/length", headers=headers).status_code == 401


def test_health_is_open_and_so_is_all_without_keys() -> None:
    assert call(KeyAuth(echo_app(), ["one"]), "GET", "/health").status_code == 200
    assert call(KeyAuth(echo_app(), []), "POST", "/length").status_code == 200
    assert call(KeyAuth(echo_app(), ["one"]), "GET", "/no-such-route").status_code == 401


def test_a_key_beyond_ascii() -> None:
    header = {"Authorization": "Bearer clé".encode()}
    assert call(KeyAuth(echo_app(), ["clé"]), "POST", "/length", headers=header).status_code == 200


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
    app = RequestId(echo_app())
    assert call(app, "GET", "/health", headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    forged = call(app, "GET", "/health", headers={"X-Request-ID": "a b"}).headers["x-request-id"]
    assert forged != "a b" and len(forged) == 32
    with caplog.at_level(logging.INFO, logger="server.middleware"):
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
        assert "secret" not in json.dumps(response.json())
