"""Many at once, and one after the other: answers belong to their questions and their pictures, and nobody hangs."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import httpx
import pytest

from server.serve import BackgroundServer
from server.settings import Settings
from tests.conftest import API_KEY, auth, chat_body, colour

CHAT = "/v1/chat/completions"
QUESTION = "What colour is this?"


def answer_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


async def post_all(url: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, headers=auth(), timeout=240, limits=limits) as client:
        return list(await asyncio.gather(*[client.post(CHAT, json=body) for body in bodies]))


def test_answers_stay_with_their_pictures_in_a_crowd(client: httpx.Client, server_url: str) -> None:
    bodies = []
    for name in ("red", "blue", "yellow", "green"):
        bodies.append(chat_body(QUESTION, colour(name=name)))
        bodies.append(chat_body(f"Tell me of {name} things.", max_tokens=24, ignore_eos=True))
    alone = [answer_of(client.post(CHAT, json=body)) for body in bodies]
    assert len(set(alone[::2])) == 4
    assert [answer_of(response) for response in asyncio.run(post_all(server_url, bodies))] == alone


def test_the_same_question_of_another_picture_is_answered_anew(client: httpx.Client) -> None:
    def ask(*images: str) -> tuple[str, int]:
        response = client.post(CHAT, json=chat_body("Which one is it?", *images))
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer_of(response), cached

    pictures = {(width, name): colour(width, 500 - width, name) for width in (100, 400) for name in ("brown", "pink")}
    first = {key: ask(url) for key, url in pictures.items()}
    again = {key: ask(url) for key, url in pictures.items()}
    for key in pictures:
        assert first[key][1] == 0  # no more than the text before the picture, which is less than a page
        assert again[key][1] > 0
        assert again[key][0] == first[key][0]
    one, other = pictures[100, "brown"], pictures[100, "pink"]
    ask(one, other)
    assert ask(other, one)[1] < 421  # its first picture is known from above, the order is not


def test_eight_pictures_fit_into_one_context(client: httpx.Client) -> None:
    body = chat_body("x", *[colour(8, 8, name) for name in ("red", "blue") * 4], max_tokens=1)
    response = client.post(CHAT, json=body)
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] > 8 * 421


def test_three_pictures_cost_the_same_whatever_their_shape(client: httpx.Client) -> None:
    def count(width: int, height: int) -> int:
        body = chat_body("x", *[colour(width, height)] * 3)
        return int(client.post("/tokenize", json=body).json()["count"])

    assert count(384, 3456) == count(384, 384)


def test_of_more_than_can_wait_each_is_served_or_told_to_come_again() -> None:
    settings = Settings(device="cpu", dtype="float32", max_num_seqs=1, max_queued_requests=2)
    with BackgroundServer(settings) as server:
        bodies = [chat_body("x", max_tokens=16, ignore_eos=True)] * 60
        responses = asyncio.run(post_all(server.url, bodies))
        assert {response.status_code for response in responses} == {200, 429}
        for response in responses:
            assert (response.status_code == 429) == ("retry-after" in response.headers)
        assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(server_url: str) -> None:
    def curl(*arguments: str) -> str:
        key = f"Authorization: Bearer {API_KEY}"
        done = subprocess.run(["curl", "-sS", "-H", key, *arguments], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    body = '{"model": "vl2-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": true}'
    streamed = curl("-N", f"{server_url}{CHAT}", "-H", "Content-Type: application/json", "-d", body)
    assert streamed.endswith("data: [DONE]\n\n")
    assert '"code":"unsupported_media_type"' in curl(f"{server_url}{CHAT}", "-d", body)
