"""Hostile requests to the live server: none is a 500, all are answered in time, and the server is well afterwards."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.schemas import OpenApiSchema

from server.app import create_app
from server.settings import Settings
from tests.conftest import API_KEY, MODEL, auth, chat_body

CHAT = "/v1/chat/completions"
EXAMPLES = 25  # of each kind for each route
FEW_TOKENS = 3


@pytest.fixture(autouse=True)
def still_well(client: httpx.Client) -> Iterator[None]:
    """After each test the server serves, and its engine's books are in order."""
    yield
    assert client.get("/health").status_code == 200
    assert client.post(CHAT, json=chat_body("Still there?", max_tokens=2)).status_code == 200
    assert client.get("/test/stats").json()["integrity_errors"] == 0


def _schema() -> OpenApiSchema:
    return schemathesis.openapi.from_dict(create_app(Settings()).openapi())


def _routes() -> list[tuple[str, str, GenerationMode]]:
    """Each route with valid requests, and those with a body with invalid ones."""
    routes = [(method, path) for path, methods in _schema().raw_schema["paths"].items() for method in methods]
    valid = [(method, path, GenerationMode.POSITIVE) for method, path in routes]
    return valid + [(method, path, GenerationMode.NEGATIVE) for method, path in routes if method == "post"]


def shorten(case: Case[Any]) -> None:
    """Let what may be served ask for few tokens: it is the request that is tested."""
    if isinstance(case.body, dict) and ("messages" in case.body or "prompt" in case.body):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            value = case.body.get(name)
            if type(value) is int and value > FEW_TOKENS:
                case.body[name] = FEW_TOKENS
        case.body.setdefault("max_tokens", FEW_TOKENS)
        least = case.body.get("min_tokens")
        if type(least) is int and least > FEW_TOKENS:
            case.body["min_tokens"] = FEW_TOKENS


@pytest.mark.parametrize(("method", "path", "mode"), _routes(), ids=str)
def test_openapi(server_url: str, method: str, path: str, mode: GenerationMode) -> None:
    operation = _schema()[path][method]
    unsound = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]

    @settings(max_examples=EXAMPLES, derandomize=True, suppress_health_check=unsound, phases=[Phase.generate])
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Case[Any]) -> None:
        shorten(case)
        response = case.call(base_url=server_url, headers=auth(), timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    run()


def raw(body: str | bytes) -> dict[str, Any]:
    return {"content": body, "headers": {"Content-Type": "application/json"}}


def nested(depth: int, opening: str, closing: str, inside: str = "1") -> str:
    return opening * depth + inside + closing * depth


BODIES: dict[str, str | bytes] = {
    "arrays": nested(100_000, "[", "]"),
    "objects": nested(50_000, '{"a":', "}"),
    "content": json.dumps(chat_body("X")).replace('"X"', nested(5000, "[", "]")),
    "schema": json.dumps({**chat_body("x"), "response_format": "Y"}).replace('"Y"', nested(5000, '{"items":', "}")),
    "many messages": json.dumps({**chat_body("x"), "messages": [{"role": "user", "content": ""}] * 10_000}),
    "many parts": json.dumps(
        {**chat_body("x"), "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 10_000}]}
    ),
    "many stops": json.dumps({**chat_body("x"), "stop": ["a"] * 10_000}),
    "many ids": json.dumps({**chat_body("x"), "stop_token_ids": list(range(10_000))}),
    "many biases": json.dumps({**chat_body("x"), "logit_bias": {str(key): 1 for key in range(10_000)}}),
    "many keys": json.dumps({**chat_body("x"), **{f"key{number}": 1 for number in range(10_000)}}),
    "long key": json.dumps({**chat_body("x"), "k" * 1_000_000: 1}),
    "long number": json.dumps({**chat_body("x"), "seed": "Z"}).replace('"Z"', "9" * 100_000),
    "huge exponent": json.dumps({**chat_body("x"), "temperature": "Z"}).replace('"Z"', "1e999999999"),
    "big seed": json.dumps({**chat_body("x"), "seed": 2**64}),
    "big n": json.dumps({**chat_body("x"), "n": 10**30}),
    "negative zero": json.dumps({**chat_body("x"), "max_tokens": "Z"}).replace('"Z"', "-0"),
    "twice": '{"model": "a", ' + json.dumps(chat_body("x"))[1:],
    "bad utf-8": json.dumps(chat_body("X")).encode().replace(b"X", b"\xff\xc0\x80\xed\xa0\x80"),
    "utf-16": json.dumps(chat_body("x")).encode("utf-16"),
    "bom": b"\xef\xbb\xbf" + json.dumps(chat_body("x")).encode(),
    "nul": json.dumps(chat_body("a\0b")),
    "raw nul": json.dumps(chat_body("X")).replace("X", "\0"),
    "half a pair": json.dumps(chat_body("X")).replace("X", "\\ud800\\ud800"),
    "odd characters": json.dumps(chat_body("\u202e\ufdd0\U0010ffff" * 50)),
    "after the end": json.dumps(chat_body("x")) + "{}",
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies(client: httpx.Client, name: str) -> None:
    for path in (CHAT, "/v1/completions", "/tokenize"):
        response = client.post(path, **raw(BODIES[name]))
        assert response.status_code < 500, (path, response.text)
        if response.status_code >= 400:
            assert len(response.content) < 5000 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    "form",
    [
        b"",
        b"--b",
        b"--b\r\n",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="\xff"\r\n\r\nx\r\n--b--\r\n',
        b"--b\r\n" + b"X: y\r\n" * 5000 + b"\r\nx\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n' * 5000 + b"--b--\r\n",
    ],
    ids=range(7),
)
@pytest.mark.parametrize("boundary", ["; boundary=b", "", "; boundary=", "; boundary=\xe9" + "b" * 500])
def test_hostile_forms(client: httpx.Client, form: bytes, boundary: str) -> None:
    headers = {b"Content-Type": f"multipart/form-data{boundary}".encode("latin-1")}
    response = client.post("/v1/caption", content=form, headers=headers)
    assert 400 <= response.status_code < 500 and response.json()["error"]["message"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/%00",
        "/v1/models/%ff%fe",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/" + "%41" * 2000,
        "//v1//models",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/v1/models?%ff=%00&" + "a=b&" * 1000,
        "/health/../metrics",
        "/docs/%0d%0aX-Injected:%20yes",
    ],
)
def test_hostile_paths(client: httpx.Client, path: str) -> None:
    response = client.get(httpx.URL(str(client.base_url).rstrip("/") + path))
    assert response.status_code < 500 and "x-injected" not in response.headers


def talk(url: str, data: bytes, *, half_close: bool = False) -> bytes:
    """Send bytes over a bare connection and read all that comes until the server hangs up."""
    where = urlsplit(url)
    received = b""
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    with connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65536):
            received += piece
    return received


def head(*lines: str, path: str = "/tokenize") -> bytes:
    fixed = (f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {API_KEY}", "Content-Type: application/json")
    return "\r\n".join([*fixed, *lines, "", ""]).encode("latin-1")


BODY = json.dumps({"prompt": "Hi"}).encode()
LENGTH = f"Content-Length: {len(BODY)}"


@pytest.mark.parametrize(
    "data",
    [
        head("Content-Length: 5") + BODY,
        head("Content-Length: 500") + BODY,
        head("Content-Length: 0") + BODY,
        head() + BODY,
        head(LENGTH, LENGTH) + BODY,
        head("Content-Length: 0x10") + BODY,
        head("Content-Length: +14") + BODY,
        head("Transfer-Encoding: chunked") + b"zz\r\n" + BODY,
        head("Transfer-Encoding: chunked") + b"ffffffffffffffffff\r\n" + BODY,
        head("Transfer-Encoding: chunked, identity") + BODY,
        head("Transfer-Encoding: chunked", LENGTH) + BODY,
        head(LENGTH, "Content-Type: text/plain") + BODY,
        head(LENGTH, "Authorization: Bearer other") + BODY,
        head(LENGTH, "X-Request-ID: a", "X-Request-ID: b") + BODY,
        head(LENGTH, "X-Request-ID: \xff\xfe") + BODY,
        head(LENGTH, "Content-Encoding: gzip") + BODY,
        head(LENGTH, "Expect: 100-continue") + BODY,
        head(LENGTH, "Expect: the-unexpected") + BODY,
        head(LENGTH, "Upgrade: websocket", "Connection: Upgrade") + BODY,
        head(LENGTH, "Upgrade: h2c", "Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQAAP__") + BODY,
        head(LENGTH, "Cookie: " + "a=b;" * 1000) + BODY,
        head(LENGTH, "traceparent: \xff") + BODY,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://elsewhere/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"BREW /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\0" * 5000,
    ],
)
def test_hostile_heads(server_url: str, data: bytes) -> None:
    answer = talk(server_url, data, half_close=True)
    for part in answer.split(b"HTTP/1.1 ")[1:]:
        assert part[:1] in b"1234", part


def test_a_smuggled_request_is_not_answered(server_url: str) -> None:
    """Of two statements about its length, none is believed."""
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + API_KEY.encode() + b"\r\n\r\n"
    answer = talk(
        server_url, head("Transfer-Encoding: chunked", "Content-Length: 5") + b"0\r\n\r\n" + hidden, half_close=True
    )
    assert answer.count(b"HTTP/1.1 ") <= 1 and MODEL.encode() not in answer


def test_pipelined_requests(server_url: str) -> None:
    answer = talk(server_url, (head(LENGTH) + BODY) * 29 + head(LENGTH, "Connection: close") + BODY)
    assert answer.count(b"HTTP/1.1 200") == 30


def test_thousands_of_headers(server_url: str) -> None:
    answer = talk(server_url, head(LENGTH, *["a: b"] * 5000, "Connection: close") + BODY)
    assert b" 431 " in answer.partition(b"\r\n")[0]
