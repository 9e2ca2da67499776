"""Clients that leave a live server: what they asked for ends in the engine, and its pages come back."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import API_KEY, MODEL, chat_body, colour, wait_until


def stats(client: httpx.Client) -> dict[str, Any]:
    response = client.get("/test/stats")
    assert response.status_code == 200
    gauges: dict[str, Any] = response.json()
    return gauges


def idle(client: httpx.Client) -> bool:
    gauges = stats(client)
    return (gauges["running"], gauges["waiting"]) == (0, 0)


def send_request(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a chat request over a bare connection and leave it open."""
    raw = json.dumps(body).encode()
    where = urlsplit(url)
    connection = socket.create_connection((where.hostname, where.port))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    )
    connection.sendall(head.encode() + raw)
    return connection


@pytest.mark.parametrize(("stream", "count"), [(False, 3), (True, 20)])
def test_clients_that_leave(client: httpx.Client, server_url: str, stream: bool, count: int) -> None:
    wait_until(lambda: idle(client))
    free = stats(client)["pages_free"]
    body = chat_body("Tell me.", max_tokens=3000, ignore_eos=True, stream=stream)
    with contextlib.ExitStack() as connections:
        for _ in range(count):
            connections.enter_context(send_request(server_url, body))
        wait_until(lambda: stats(client)["running"] == count)
    wait_until(lambda: idle(client))
    assert stats(client)["pages_free"] == free
    assert stats(client)["integrity_errors"] == 0


def test_a_client_that_leaves_with_a_picture_and_several_choices(client: httpx.Client, server_url: str) -> None:
    wait_until(lambda: idle(client))
    free = stats(client)["pages_free"]
    body = chat_body("Tell me.", colour(), n=3, max_tokens=3000, ignore_eos=True)
    with send_request(server_url, body):
        wait_until(lambda: stats(client)["running"] == 3)
    wait_until(lambda: idle(client))
    assert stats(client)["pages_free"] == free


def test_a_long_prompt_streams_to_its_end(client: httpx.Client) -> None:
    limit = client.get("/v1/models").json()["data"][0]["max_model_len"]
    body = {"model": MODEL, "prompt": [65] * (limit - 4), "max_tokens": 4, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = list(response.iter_lines())
    assert response.status_code == 200
    assert lines[-2:] == ["data: [DONE]", ""]
