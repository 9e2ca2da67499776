"""The soak: a few seconds of it against the live server, and that it sees what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from server.settings import Settings
from server.soak import Report, Wrong, _answer, soak
from tests.conftest import API_KEY


def test_a_short_soak(server_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(api_key=(SecretStr(API_KEY),))
    assert soak(settings, base_url=server_url, minutes=0.06, seed=1, concurrency=8), capsys.readouterr().out
    out = capsys.readouterr().out
    assert "0 problems" in out and "answered" in out


def answer(handler: Callable[[httpx.Request], httpx.Response], **body: Any) -> list[str] | None:
    async def run() -> list[str] | None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://test") as client:
            return await _answer(client, {"n": 1, "stream": False, **body})

    return asyncio.run(run())


def chunk(index: int, text: str, reason: str | None = None) -> str:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


def test_whole_and_streamed_answers_are_read() -> None:
    whole = httpx.Response(200, json={"choices": [{"message": {"content": "ab"}}]})
    assert answer(lambda _: whole) == ["ab"]
    events = [chunk(0, "a"), chunk(1, "x", "stop"), chunk(0, "b", "length"), "data: [DONE]\n\n"]
    assert answer(lambda _: httpx.Response(200, text="".join(events)), n=2, stream=True) == ["ab", "x"]
    assert answer(lambda _: httpx.Response(429)) is None
    assert answer(lambda _: httpx.Response(503), stream=True) is None


@pytest.mark.parametrize(
    ("response", "body", "problem"),
    [
        (httpx.Response(500, text="oh"), {}, "status 500: oh"),
        (httpx.Response(200, json={"choices": []}), {}, "0 of 1 choices"),
        (httpx.Response(200, json={"choices": [{"message": {"content": "stop"}}]}), {"stop": ["to"]}, "'to'"),
        (httpx.Response(200, text=chunk(0, "a")), {"stream": True}, "a stream ended with"),
        (httpx.Response(200, text=chunk(0, "a") + "data: [DONE]\n\n"), {"stream": True}, "have no end"),
    ],
)
def test_what_is_wrong_is_seen(response: httpx.Response, body: dict[str, Any], problem: str) -> None:
    with pytest.raises(Wrong, match=problem):
        answer(lambda _: response, **body)


def test_growing_memory_is_seen() -> None:
    flat, growing = Report(memory=[500.0] * 40), Report(memory=[500.0 + 20 * i for i in range(40)])
    flat.check_memory()
    growing.check_memory()
    assert flat.problems == [] and "memory grew from" in growing.problems[0]
