"""The real application around an engine that does what a test tells it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import httpx
from fastapi import FastAPI

from model.config import load_config
from model.tokenizer import Tokenizer
from server.app import create_app
from server.engine.client import EngineClient
from server.engine.request import EngineInfo, EngineRequest, TokenEvent, TokenLogprobs
from server.fetch import MediaFetcher
from server.prepare import Preparer
from server.service import Service
from server.settings import DEFAULT_MODEL, Settings

Script = Callable[[EngineRequest], AsyncGenerator[TokenEvent, None]]


class ScriptedEngine:
    """Stands where EngineClient does; `script` makes the events of each request."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.healthy = True
        self.ended: list[str] = []
        self.info = EngineInfo(
            max_model_len=4096,
            max_num_seqs=4,
            kv_cache_tokens=4096,
            vocab_size=1024,
            eos_token_id=1014,
            device="cpu",
            dtype="float32",
            num_parameters=1,
            load_seconds=0.0,
        )

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        try:
            async for event in self.script(request):
                yield event
        finally:
            self.ended.append(request.request_id)


def application(script: Script, **options: Any) -> tuple[FastAPI, ScriptedEngine]:
    """The real application without a lifespan, around a scripted engine. `options` are settings."""
    settings = Settings(**options)
    tokenizer = Tokenizer.from_folder(DEFAULT_MODEL)
    preparer = Preparer(settings, load_config(DEFAULT_MODEL), tokenizer, MediaFetcher(settings.fetch_policy))
    engine = ScriptedEngine(script)
    app = create_app(settings)
    app.state.service = Service(settings, tokenizer, preparer, cast(EngineClient, engine))
    return app, engine


def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx.Response:
    return _send(app, "POST", path, json=body)


def get(app: FastAPI, path: str) -> httpx.Response:
    return _send(app, "GET", path)


def _send(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(run())


def event(request: EngineRequest, *tokens: int, reason: Any = None, error: str | None = None) -> TokenEvent:
    return TokenEvent(request_id=request.request_id, token_ids=list(tokens), finish_reason=reason, error=error)


def says(text: str) -> Script:
    """An engine that answers with this text, a token at a time, its special tokens parsed."""
    tokenizer = Tokenizer.from_folder(DEFAULT_MODEL)
    tokens = tokenizer.encode_control(text)

    async def script(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        for token in tokens:
            logprobs = [TokenLogprobs(-0.5, [])] if request.sampling.logprobs is not None else None
            yield TokenEvent(request_id=request.request_id, token_ids=[token], logprobs=logprobs)
        yield event(request, tokenizer.eos_token_id, reason="stop")

    return script


def payloads(response: httpx.Response) -> list[Any]:
    """The JSON events of a stream, without the final [DONE]."""
    assert response.status_code == 200, response.text
    *events, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]
