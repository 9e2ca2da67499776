"""Images that a request names by URL: fetched before the prompt is made, within limits, or the request is refused."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.engine.request import EngineRequest, TokenEvent
from server.fetch import MediaFetcher
from server.prepare import MAX_FETCHES
from server.settings import Settings
from tests.conftest import chat_body, colour
from tests.server.scripted import application, event, post
from tests.server.test_prepare import messages, prepare, refusal

PICTURE = base64.b64decode(colour(40, 20).partition(",")[2])
PLACE = "messages[0].content[{}].image_url"


def fetcher(answer: Callable[[httpx.Request], Coroutine[None, None, httpx.Response]], **settings: Any) -> MediaFetcher:
    """A fetcher for an internet in which every name exists and every server answers so."""

    async def resolve(name: str, port: int) -> Sequence[str]:
        return ["93.184.216.34"]

    policy = Settings(**settings).fetch_policy
    return MediaFetcher(policy, resolver=resolve, transport=httpx.MockTransport(answer))


def file(content: bytes) -> httpx.Response:
    """An answer whose body is still to come."""

    async def body() -> AsyncGenerator[bytes, None]:
        yield content

    return httpx.Response(200, content=body())


async def picture(request: httpx.Request) -> httpx.Response:
    return file(PICTURE)


def test_a_fetched_picture_is_the_same_as_one_that_was_sent() -> None:
    sent = prepare(messages("x", colour(40, 20)))
    assert prepare(messages("x", "https://example.com/cat.png"), fetcher=fetcher(picture)) == sent
    mixed = prepare(messages("x", " HTTP://example.com/a ", colour(), "http://example.com/b"), fetcher=fetcher(picture))
    assert mixed.image_sizes == ((40, 20), (64, 64), (40, 20))


def test_what_was_fetched_must_be_a_picture() -> None:
    async def page(request: httpx.Request) -> httpx.Response:
        return file(b"<html>a page</html>")

    error = refusal(messages("x", colour(), "http://example.com/"), fetcher=fetcher(page))
    assert (error.param, error.code) == (PLACE.format(1), "invalid_image")
    assert "format is not supported" in error.message


def test_the_first_failure_ends_the_other_fetches() -> None:
    ended: list[str] = []

    async def one_fails(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/gone":
            return httpx.Response(404)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.url.path)
        raise AssertionError

    error = refusal(
        messages("x", "http://a.test/1", "http://a.test/gone", "http://a.test/2"), fetcher=fetcher(one_fails)
    )
    assert error.param == PLACE.format(1) and "404" in error.message
    assert sorted(ended) == ["/1", "/2"]


def test_fetched_files_of_a_request_have_one_limit_together() -> None:
    limit = 2 * len(PICTURE) + 1024
    urls = ["http://a.test/"] * (limit // len(PICTURE))
    options: dict[str, Any] = {"max_body_bytes": limit, "max_images": 99}
    assert len(prepare(messages("x", *urls), fetcher=fetcher(picture), **options).images) == len(urls)
    assert str(limit) in refusal(messages("x", *urls, urls[0]), fetcher=fetcher(picture), **options).message


def test_only_so_many_fetches_run_at_once() -> None:
    running = most = 0

    async def slow(request: httpx.Request) -> httpx.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(20):
            await asyncio.sleep(0)
        running -= 1
        return file(PICTURE)

    prepare(messages("x", *["http://a.test/"] * 16), fetcher=fetcher(slow))
    assert most == MAX_FETCHES


def test_files_are_for_the_allowed_folder_alone(tmp_path: Path) -> None:
    path = tmp_path / "cat.png"
    path.write_bytes(PICTURE)
    for url in (str(path), path.as_uri()):
        assert "opens no files" in refusal(messages("x", url)).message
        assert prepare(messages("x", url), allowed_media_path=tmp_path).image_sizes == ((40, 20),)
    assert "not within" in refusal(messages("x", "/etc/hostname"), allowed_media_path=tmp_path).message


def test_urls_can_be_switched_off() -> None:
    error = refusal(messages("x", "https://example.com/a.png"), no_media_urls=True)
    assert "fetches no images from URLs" in error.message


@pytest.fixture
def closed_network() -> Iterator[int]:
    """The port of a file server of this machine that has one picture."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(PICTURE)))
            self.end_headers()
            self.wfile.write(PICTURE)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield server.server_address[1]
        server.shutdown()


def test_pictures_of_a_closed_network(closed_network: int) -> None:
    """The whole way from the settings to the engine, over a real connection."""
    url = f"http://127.0.0.1:{closed_network}/cat.png"
    sizes: list[int] = []

    async def script(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        sizes.append(len(request.images))
        yield event(request, 65, reason="length")

    options: dict[str, Any] = {"allow_private_media": True, "allowed_media_ports": (closed_network,)}
    app, _ = application(script, **options)
    assert post(app, "/v1/chat/completions", chat_body("x", url)).status_code == 200
    assert sizes == [1]
    for fewer in ({}, {"allow_private_media": True}, {"allowed_media_ports": (closed_network,)}):
        app, _ = application(script, **fewer)
        assert post(app, "/v1/chat/completions", chat_body("x", url)).status_code == 400
    app, _ = application(script, **options, allowed_media_domains=("example.com",))
    assert "127.0.0.1" in post(app, "/tokenize", chat_body("x", url)).json()["error"]["message"]
    assert sizes == [1]
