"""`vl2 chat` against a server that answers as a test tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.terminal import _Conversation, _deltas

ODD = "a\u2028b\u0085c\x0bd\x1ce\u2029f\rg"


def events(*texts: str) -> bytes:
    """A stream of these deltas, its characters as they are."""
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    return "".join(f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n" for chunk in chunks).encode()


class Interrupted(httpx.SyncByteStream):
    """A stream during which a person presses Ctrl-C."""

    def __init__(self, begin: bytes) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[bytes]:
        yield self._begin
        raise KeyboardInterrupt


class Chat:
    """A conversation whose server notes what it is asked."""

    def __init__(self, *responses: httpx.Response) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        waiting = iter(responses)

        def respond(request: httpx.Request) -> httpx.Response:
            self.asked.append(json.loads(request.content)["messages"])
            return next(waiting)

        client = httpx.Client(transport=httpx.MockTransport(respond), base_url="http://test")
        self._conversation = _Conversation(client, "model", 0.0)

    def say(self, *lines: str) -> None:
        waiting = iter([*lines, "/quit"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.input", lambda _: next(waiting))
            self._conversation.run()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture"
    path.write_bytes(b"picture")
    return path


def kinds(messages: list[dict[str, Any]]) -> list[list[str]]:
    return [[part["type"] for part in message["content"]] for message in messages if message["role"] == "user"]


def refusal() -> httpx.Response:
    return httpx.Response(429, json={"error": {"message": "later"}})


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_only_line_feeds_end_the_lines_of_a_stream(size: int) -> None:
    raw = events(ODD, "end") + b"data: [DONE]"
    pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert "".join(_deltas(httpx.Response(200, content=iter(pieces)))) == ODD + "end"


def test_a_refused_question_keeps_its_pictures(picture: Path) -> None:
    chat = Chat(refusal(), httpx.Response(200, content=events("yes")), httpx.Response(200, content=events("no")))
    chat.say(f"/image {picture}", "one", "two", "three")
    assert kinds(chat.asked[1]) == [["image_url", "text"]]
    assert kinds(chat.asked[2]) == [["image_url", "text"], ["text"]]


def test_an_answer_that_is_given_up_before_it_begins_was_never_asked_for(picture: Path) -> None:
    begun = httpx.Response(200, stream=Interrupted(events("par", "tial")))
    chat = Chat(httpx.Response(200, stream=Interrupted(events(""))), begun, httpx.Response(200, content=events("yes")))
    chat.say(f"/image {picture}", "one", "two", "three")
    assert kinds(chat.asked[1]) == [["image_url", "text"]]
    assert [message["content"] for message in chat.asked[2] if message["role"] == "assistant"] == ["partial"]
