"""Failures of the engine, and clients that leave, against an engine that does what a test tells it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from model.tokenizer import Tokenizer
from server.answers import ChatChunk, ChatChunkWithUsage
from server.engine.request import (
    EngineDeadError,
    EngineRequest,
    EngineStopped,
    QueueFull,
    RequestRejected,
    TokenEvent,
)
from server.generation import _wrap
from server.settings import DEFAULT_MODEL
from tests.conftest import MODEL, chat_body, colour
from tests.server.scripted import Script, application, event, get, post, says


async def endless(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    while True:
        yield event(request, 65)
        await asyncio.sleep(0)


async def silent(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    await asyncio.Event().wait()
    yield event(request)


async def rejects(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    raise RequestRejected("needs 5000 of 4096 tokens")
    yield event(request)


async def is_full(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    raise QueueFull("64 requests are running and 256 waiting")
    yield event(request)


async def dead(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    raise EngineDeadError("gone")
    yield event(request)


async def stopped(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    raise EngineStopped("the engine was stopped")
    yield event(request)


async def fails(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    yield event(request, reason="error", error="OutOfMemoryError: too large")


async def dies_later(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    yield event(request, 65)
    raise EngineDeadError("gone")


async def has_a_bug(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    yield event(request, 65)
    raise KeyError("a secret of the server")


async def ends_early(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
    yield event(request, 65)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (rejects, 400, "request_rejected"),
        (is_full, 429, "queue_full"),
        (dead, 503, "engine_dead"),
        (stopped, 503, "aborted"),
        (fails, 500, "engine_error"),
    ],
)
def test_failures_before_the_first_token_have_a_status(script: Script, status: int, code: str, stream: bool) -> None:
    app, _ = application(script)
    for path, body in (
        ("/v1/chat/completions", chat_body("x", stream=stream)),
        ("/v1/completions", {"model": MODEL, "prompt": "x", "stream": stream}),
    ):
        response = post(app, path, body)
        assert response.status_code == status
        assert response.json()["error"]["code"] == code
        assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize(("script", "status"), [(is_full, 429), (stopped, 503)])
def test_every_route_that_generates_says_to_come_again(script: Script, status: int) -> None:
    app, _ = application(script)
    picture = base64.b64decode(colour().partition(",")[2])

    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [
                await client.post("/v1/caption", files={"image": ("x.png", picture)}),
                await client.post("/v1/responses", json={"model": MODEL, "input": "x"}),
                await client.post("/v1/responses", json={"model": MODEL, "input": "x", "stream": True}),
            ]

    for response in asyncio.run(run()):
        assert response.status_code == status
        assert response.json()["error"]["code"] in ("queue_full", "aborted")
        assert int(response.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    ("script", "code"),
    [(dies_later, "engine_dead"), (ends_early, "engine_error"), (has_a_bug, "internal_error")],
)
def test_failures_within_a_stream_are_its_last_event(script: Script, code: str) -> None:
    app, _ = application(script)
    response = post(app, "/v1/chat/completions", chat_body("x", stream=True))
    assert response.status_code == 200
    *_, last = response.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert "[DONE]" not in response.text and "secret" not in response.text


def test_a_bug_is_a_plain_500() -> None:
    app, _ = application(has_a_bug)
    response = post(app, "/v1/chat/completions", chat_body("x"))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text


def test_a_dead_engine_is_told_at_once() -> None:
    app, engine = application(silent)
    engine.healthy = False
    for path, body in (
        ("/v1/chat/completions", chat_body("x")),
        ("/v1/completions", {"model": MODEL, "prompt": "x"}),
    ):
        assert post(app, path, body).status_code == 503

    for path in ("/health", "/ready"):
        response = get(app, path)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"


def test_one_failed_choice_ends_its_siblings() -> None:
    async def second_fails(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        source = fails(request) if request.request_id.endswith("-1") else endless(request)
        async for item in source:
            yield item

    app, engine = application(second_fails)
    assert post(app, "/v1/chat/completions", chat_body("x", n=3)).status_code == 500
    assert len(engine.ended) == 3


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    app, engine = application(endless)
    tokenizer = Tokenizer.from_folder(DEFAULT_MODEL)
    letter = tokenizer.token_bytes(65).decode()
    response = post(app, "/v1/chat/completions", chat_body("x", stop=letter * 3, max_tokens=100))
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert response.json()["usage"]["completion_tokens"] == 3
    assert len(engine.ended) == 1


async def speak(
    app: FastAPI, body: dict[str, Any], left: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]
) -> None:
    """Speak ASGI as a server does whose client goes away when `left` returns."""
    raw = json.dumps(body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    incoming = iter([{"type": "http.request", "body": raw, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(incoming, None)
        if message is None:
            await left()
            return {"type": "http.disconnect"}
        return message

    await asyncio.wait_for(app(scope, receive, send), timeout=60)


async def leave(app: FastAPI, body: dict[str, Any], left: Callable[[], Awaitable[None]]) -> None:
    async def send(message: Any) -> None:
        await asyncio.sleep(0)

    await speak(app, body, left, send)


@pytest.mark.parametrize("script", [silent, endless])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_requests(script: Script, stream: bool) -> None:
    app, engine = application(script)
    started = 0

    async def counting(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        nonlocal started
        started += 1
        async for item in script(request):
            yield item

    engine.script = counting

    async def when_all_run() -> None:
        while started < 2:
            await asyncio.sleep(0)

    asyncio.run(leave(app, chat_body("x", n=2, stream=stream, max_tokens=4000), when_all_run))
    assert len(engine.ended) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_priority_and_salt_reach_the_engine_and_cached_tokens_the_client(stream: bool) -> None:
    seen: list[tuple[int, str]] = []

    async def cached(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        seen.append((request.priority, request.cache_salt))
        yield TokenEvent(request_id=request.request_id, token_ids=[65], cached_tokens=64 * len(seen))
        yield event(request, 65, reason="length")

    app, _ = application(cached)
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    fields = {"n": 2, "priority": -3, "cache_salt": "mine", "stream": stream, **options}
    bodies = {
        "/v1/chat/completions": chat_body("x", **fields),
        "/v1/completions": {"model": MODEL, "prompt": ["x", "y"], **fields},
    }
    for path, body in bodies.items():
        response = post(app, path, body)
        text = response.text if not stream else response.text.strip().split("\n\n")[-2].removeprefix("data: ")
        usage = json.loads(text)["usage"]
        expected = 64 if path.startswith("/v1/chat") else (64 * 3) + (64 * 5)
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}
    assert set(seen) == {(-3, "mine")}


@pytest.mark.parametrize("stream", [False, True])
def test_pictures_are_let_go_once_the_engine_has_them(stream: bool) -> None:
    seen: list[int] = []

    async def watching(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        seen.append(len(request.images))
        await asyncio.sleep(0)
        yield event(request, 65)
        seen.append(len(request.images))
        yield event(request, 65, reason="length")

    app, _ = application(watching)
    assert post(app, "/v1/chat/completions", chat_body("x", colour(), n=3, stream=stream)).status_code == 200
    assert seen[:3] == [1, 1, 1] and seen[3:] == [0, 0, 0]


def test_a_client_that_stops_reading_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.streaming.WRITE_TIMEOUT_S", 0.05)
    app, engine = application(endless)

    async def run() -> None:
        stuck = asyncio.Event()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await stuck.wait()

        await speak(app, chat_body("x", stream=True, max_tokens=4000), stuck.wait, send)

    asyncio.run(run())
    assert len(engine.ended) == 1


def test_seeds_wrap_around() -> None:
    assert _wrap(2**63 - 1) == 2**63 - 1
    assert _wrap(2**63) == -(2**63)
    assert _wrap(-5) == -5


@pytest.mark.parametrize("include_usage", [False, True])
def test_chunks_are_written_as_their_models_write_them(include_usage: bool) -> None:
    """Those of text alone are put together by hand."""
    app, _ = application(says('a "b" \\ \n\r\t\b\f\x00\x1f\x7f </é\u2028\U0001f600'))
    body = chat_body("x", stream=True, n=2, stream_options={"include_usage": include_usage})
    form = ChatChunkWithUsage if include_usage else ChatChunk
    lines = [line.removeprefix("data: ") for line in post(app, "/v1/chat/completions", body).text.split("\n") if line]
    assert len(lines) > 20
    for line in lines[:-1]:
        assert form.model_validate_json(line).model_dump_json() == line
