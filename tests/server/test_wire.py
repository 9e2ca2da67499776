"""Raw connections to a small application behind the real protocol: slow, long and wrong heads."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from server.settings import Settings
from server.wire import protocol_for

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
PATIENCE_S = 0.3


LEFT = threading.Event()


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes of the path, before it reads any body; /wait waits until its client leaves."""
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        LEFT.set()
    body = str(len(scope["path"])).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    settings = Settings(read_timeout=PATIENCE_S, max_header_bytes=2048)
    config = uvicorn.Config(
        hello, http=protocol_for(settings), ws="none", lifespan="off", log_config=None, timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()


def until_closed(connection: socket.socket) -> bytes:
    """All that comes until the server hangs up."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:  # it hung up on what was still being sent
        pass
    return received


def talk(address: tuple[str, int], *pieces: bytes, pause: float = 0.0) -> bytes:
    with socket.create_connection(address, timeout=30) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return until_closed(connection)


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def test_a_connection_that_says_nothing_is_closed(address: tuple[str, int]) -> None:
    assert talk(address) == b""


def test_a_head_that_stalls_or_drips(address: tuple[str, int]) -> None:
    assert error_of(talk(address, HEAD)) == (408, "request_timeout")
    drip = [bytes([byte]) for byte in HEAD * 40]
    assert error_of(talk(address, *drip, pause=0.02)) == (408, "request_timeout")
    assert talk(address, b"\r\n", b"\r\n", pause=0.1) == b""


def test_a_quick_head_and_a_second_one_that_stalls(address: tuple[str, int]) -> None:
    answer = talk(address, HEAD + b"\r\n", HEAD, pause=0.05)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 2
    assert b"408 Request Timeout" in answer


@pytest.mark.parametrize(
    "start",
    [HEAD + b"X-Long: ", b"GET /", HEAD + b"X-", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 100],
    ids=["value", "url", "name", "many"],
)
def test_a_head_without_end(address: tuple[str, int], start: bytes) -> None:
    filler = b"A: b\r\n" * 1000 if start.endswith(b"\n") else b"a" * 5000
    assert error_of(talk(address, start, *[filler] * 200)) == (431, "headers_too_large")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_not_http(address: tuple[str, int], data: bytes) -> None:
    assert error_of(talk(address, data)) == (400, "invalid_http")


def test_the_rest_of_an_unwanted_body_may_not_take_for_ever(address: tuple[str, int]) -> None:
    body = [b"x"] * 60
    answer = talk(address, b"POST / HTTP/1.1\r\nContent-Length: 1000\r\n\r\n", *body, pause=0.02)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1 ") == 1


def test_pipelined_requests_are_answered_in_order(address: tuple[str, int]) -> None:
    requests = b"".join(b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * length) for length in range(19))
    requests += b"GET /%s HTTP/1.1\r\nConnection: close\r\n\r\n" % (b"a" * 19)
    answer = talk(address, requests)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [str(1 + length).encode() for length in range(20)]


def test_of_pipelined_requests_the_one_being_answered_hears_that_its_client_left(address: tuple[str, int]) -> None:
    request = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(request * 3)
        time.sleep(0.1)
    assert LEFT.wait(30)
