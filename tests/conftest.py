"""A live server on the demo model, shared by every test that talks HTTP."""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import hypothesis
import msgspec
import pytest
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from PIL import Image
from pydantic import SecretStr

from server.serve import BackgroundServer
from server.service import service_of
from server.settings import DEFAULT_MODEL, DEFAULT_MODEL_NAME, Settings

API_KEY = "a-key-for-tests"
MODEL = DEFAULT_MODEL_NAME
# Generous: what is waited for takes milliseconds on an idle machine.
PATIENCE_S = 60.0

# Slow machines are no failures, and a failure must come again.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")

# A developer's own settings must not reach the tests.
for _field in Settings.model_fields:
    os.environ.pop(f"VL2_{_field.upper()}", None)


def _add_stats(server: BackgroundServer) -> None:
    """A route for tests that shows the engine's gauges."""

    async def stats(request: Request) -> Response:
        return JSONResponse(msgspec.to_builtins(await service_of(request).engine.stats()))

    server.app.add_route("/test/stats", stats)


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Base URL of a server with an API key and all its middleware, float32 on the CPU."""
    assert (DEFAULT_MODEL / "config.json").is_file(), f"the demo checkpoint is missing: {DEFAULT_MODEL}"
    settings = Settings(device="cpu", dtype="float32", api_key=(SecretStr(API_KEY),), max_num_seqs=32)
    server = BackgroundServer(settings)
    _add_stats(server)
    with server:
        yield server.url


@pytest.fixture(scope="session")
def client(server_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of the server, with the key."""
    with httpx.Client(base_url=server_url, headers=auth(), timeout=120) as client:
        yield client


def auth() -> dict[str, str]:
    return {"Authorization": f"Bearer {API_KEY}"}


def data_url(image: Image.Image, form: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def colour(width: int = 64, height: int = 64, name: str = "red") -> str:
    """A picture of one colour as a data URL."""
    return data_url(Image.new("RGB", (width, height), name))


def chat_body(text: str, *images: str, **fields: Any) -> dict[str, Any]:
    """A short greedy chat request: pictures, then text."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 8, **fields}


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; fail after a deadline that only a fault can reach."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
