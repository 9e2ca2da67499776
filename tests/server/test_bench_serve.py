"""`vl2 bench serve`: its arithmetic, what it makes of broken answers, and a few requests to the live server."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from server.cli import app
from server.load.answer import Answer, read_answer, text_times
from server.load.connection import Connection, Reply, Target
from server.load.figures import Spread, figures, percentile, table
from server.load.questions import Form, draw_picture, draw_pictures
from server.load.scenarios import Bench, BenchError, Plan
from tests.conftest import API_KEY

FORM = Form(model="m", max_tokens=8, prompt_tokens=4, temperature=0.0, seed=3, ignore_eos=True)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def chunk(text: str | None = None, **fields: Any) -> bytes:
    delta = {"role": "assistant", "content": ""} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **fields})


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


DONE = b"data: [DONE]\n\n"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": None}})


def reply(*pieces: tuple[float, bytes], **fields: Any) -> Reply:
    return Reply(**{"sent": 10.0, "ended": 12.0, "status": 200, "pieces": list(pieces), **fields})


def whole(*, sent: float, times: tuple[float, ...], tokens: int, ended: float) -> Answer:
    return Answer(sent=sent, ended=ended, times=times, tokens=tokens, counted=True)


# Arithmetic


def test_percentiles_lie_between_values() -> None:
    values = [1.0, 2.0, 4.0, 8.0]
    assert [percentile(values, p) for p in (0, 50, 75, 100)] == [1.0, 3.0, 5.0, 8.0]
    assert percentile([7.0], 99) == 7.0
    assert Spread.of([]) is None
    spread = Spread.of([0.003, 0.001, 0.002])
    assert spread is not None and (spread.mean, spread.p50, spread.max) == pytest.approx((2.0, 2.0, 3.0))
    assert spread.p90 == pytest.approx(2.8) and spread.p99 == pytest.approx(2.98)


def test_figures_of_answers_by_hand() -> None:
    first = whole(sent=0.0, times=(0.5, 0.6, 0.9), tokens=5, ended=1.0)  # events may bring several tokens
    second = whole(sent=0.0, times=(1.5,), tokens=1, ended=2.0)
    row = figures([first, "status 429 queue_full", second, "status 429 queue_full", "timeout"], clients=2, duration_s=4)
    assert (row.requests, row.answered, row.output_tokens) == (5, 2, 6)
    assert row.errors == {"status 429 queue_full": 2, "timeout": 1}
    assert (row.requests_per_s, row.output_tokens_per_s, row.tokens_from) == (0.5, 1.5, "usage")
    assert row.first_token_ms is not None and row.first_token_ms.p50 == pytest.approx(1000)
    assert row.token_ms is not None and row.token_ms.mean == pytest.approx(100)  # 0.4 s over 4; a lone token has none
    assert row.gap_ms is not None and row.gap_ms.max == pytest.approx(300)
    assert row.total_ms is not None and row.total_ms.max == pytest.approx(2000)
    assert row.prompt_tokens is None and row.cached_tokens is None
    text = table([("load", row)])
    assert "FAILED, load: 2 x status 429 queue_full" in text and "0.50" in text


def test_figures_without_an_answer() -> None:
    row = figures(["timeout"], clients=1, duration_s=1.0)
    assert row.first_token_ms is None and row.requests_per_s == 0 and "-" in table([("load", row)])


# Answers


def test_events_have_the_time_at_which_they_ended() -> None:
    parts = chunk() + chunk("a")
    pieces = [(10.5, parts[:-3]), (10.6, parts[-3:] + chunk("b") + chunk("")), (10.9, chunk("c") + USAGE + DONE)]
    answer = read_answer(reply(*pieces))
    assert isinstance(answer, Answer)
    assert answer.times == (10.6, 10.6, 10.9)
    assert (answer.tokens, answer.counted, answer.prompt_tokens, answer.cached_tokens) == (5, True, 9, None)
    assert answer.first_token_s == pytest.approx(0.6) and answer.token_s == pytest.approx(0.3 / 4)
    assert answer.total_s == 2.0
    assert text_times(reply(*pieces)) == [10.6, 10.6, 10.9]


def test_tokens_are_events_where_the_server_does_not_count() -> None:
    answer = read_answer(reply((11.0, chunk("a").replace(b"\n", b"\r\n")), (11.5, chunk("b") + DONE)))
    assert isinstance(answer, Answer) and (answer.tokens, answer.counted) == (2, False)
    assert figures([answer], clients=1, duration_s=1.0).tokens_from == "chunks"


def test_an_answer_without_text_began_with_its_first_event() -> None:
    answer = read_answer(reply((11.0, chunk()), (11.5, USAGE + DONE)))
    assert isinstance(answer, Answer) and answer.times == (11.0,)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (reply((11, b'{"error": {"code": "queue_full", "type": "x"}}'), status=429), "status 429 queue_full"),
        (reply((11, b"<html>"), status=502), "status 502"),
        (reply((11, b"{}"), status=400), "status 400"),
        (reply((11, chunk("a") + event({"error": {"code": "engine_dead"}}))), "error in the stream: engine_dead"),
        (reply((11, chunk("a"))), "the stream ended without [DONE]"),
        (reply((11, USAGE + DONE)), "an answer without a choice"),
        (reply((11, b"data: what\n\n")), "not a stream of chat completion chunks"),
        (reply((11, b'data: {"choices": 1}\n\n')), "not a stream of chat completion chunks"),
        (reply((11, chunk("a")), status=0, failure="connection lost"), "connection lost after some tokens"),
        (reply((11, chunk()), failure="timeout"), "timeout after no tokens"),
        (reply(status=0, failure="cannot connect: OSError"), "cannot connect: OSError"),
    ],
)
def test_kinds_of_failures(given: Reply, kind: str) -> None:
    assert read_answer(given) == kind


# Connections, to a server that says what a test tells it


async def with_server(answers: list[bytes | None], talk: Callable[[Target], Awaitable[Any]]) -> tuple[Any, list[bytes]]:
    """What `talk` returns, and the bodies that came. None as an answer: say nothing; a short one: hang up after it."""
    bodies: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not reader.at_eof():
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            assert b"Authorization: Bearer key\r\n" in head
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            bodies.append(await reader.readexactly(length))
            answer = answers.pop(0)
            if answer is None:
                await reader.read()
                break
            writer.write(answer)
            if not answer.endswith(b"0\r\n\r\n"):
                break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await talk(Target(f"http://127.0.0.1:{port}/v1", "Bearer key")), bodies
    finally:
        server.close()


def http(body: bytes, status: str = "200 OK", end: bool = True) -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head.encode() + b"%x\r\n%s\r\n" % (len(body), body) + (b"0\r\n\r\n" if end else b"")


def test_a_connection_takes_whole_refused_and_broken_answers() -> None:
    well = chunk("a") + USAGE + DONE
    answers = [http(well), http(b'{"error": {"code": "c"}}', "429 Too Many"), http(chunk("a"), end=False), http(well)]

    async def talk(target: Target) -> list[Answer | str]:
        connection = Connection(target, timeout_s=10.0)
        replies = [await connection.ask([b"one ", b"body"]) for _ in range(4)]
        connection.close()
        assert all(reply.ended >= reply.sent for reply in replies)
        return [read_answer(reply) for reply in replies]

    results, bodies = asyncio.run(with_server([*answers], talk))
    assert [isinstance(result, Answer) for result in results] == [True, False, False, True]
    assert results[1:3] == ["status 429 c", "connection lost after some tokens"]
    assert bodies == [b"one body"] * 4


def test_silence_and_closed_ports_are_failures() -> None:
    async def talk(target: Target) -> list[str | None]:
        silent = await Connection(target, timeout_s=0.05).ask([b"x"])
        closed = await Connection(Target("http://127.0.0.1:1"), timeout_s=5.0).ask([b"x"])
        return [silent.failure, closed.failure]

    [silent, closed], _ = asyncio.run(with_server([None], talk))
    assert silent == "timeout" and closed is not None and closed.startswith("cannot connect")


@pytest.mark.parametrize("url", ["ftp://host", "nothing", "http://", "http://host:x"])
def test_targets_are_urls(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Target(url)


def test_a_server_that_does_not_know_ignore_eos_is_asked_without() -> None:
    async def talk(target: Target) -> bool:
        return await Bench(target, Plan(FORM)).probe()

    answers = [http(b"{}", "400 Bad Request"), http(chunk("a") + DONE)]
    takes, bodies = asyncio.run(with_server([*answers], talk))
    assert not takes
    assert ["ignore_eos" in json.loads(body) for body in bodies] == [True, False]
    with pytest.raises(BenchError, match="status 400"):
        asyncio.run(with_server([answers[0], answers[0]], talk))


# What is asked


def test_pictures_are_new_and_of_the_size_asked_for() -> None:
    pictures = draw_pictures(3, 0, 3, (60, 40), "png")
    assert len(set(pictures)) == 3 and all(url.startswith(b"data:image/png;base64,") for url in pictures)
    assert draw_pictures(3, 1, 2, (60, 40), "png") == pictures[1:]
    assert Image.open(io.BytesIO(draw_picture([3, 1], (60, 40), "jpeg"))).size == (60, 40)
    assert 100_000 < len(draw_picture([0, 0], (1024, 768), "jpeg")) < 600_000  # as a photo


def test_bodies_share_a_pictures_bytes() -> None:
    picture = b"data:image/png;base64,AAAA"
    one, two = FORM.body(1, picture), FORM.body(2, picture)
    assert one[1] is two[1] is picture
    [message] = json.loads(b"".join(one))["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert message["content"][0]["image_url"]["url"] == picture.decode()
    assert len(message["content"][1]["text"].split()) == 4
    assert FORM.body(1, None) == FORM.body(1, None) != FORM.body(2, None)


# The command, at the live server


def test_load_idle_and_arrivals(server_url: str, tmp_path: Path) -> None:
    common = ["--base-url", server_url, "--api-key", API_KEY, "--max-tokens", "3", "--pictures", "40x30"]

    def report(*arguments: str) -> dict[str, Any]:
        result = bench(*common, *arguments, "--json", str(tmp_path / "figures"))
        assert result.exit_code == 0, result.output
        assert "first token ms" in result.stdout and "FAILED" not in result.stdout
        found = json.loads((tmp_path / "figures").read_text())
        assert found["ignore_eos"] and found["client_cpu"] > 0
        for row in found["results"]:
            assert row["answered"] == row["requests"] and row["errors"] == {} and row["tokens_from"] == "usage"
            assert row["output_tokens"] == 3 * row["requests"]
            assert row["requests_per_s"] == pytest.approx(row["requests"] / row["duration_s"])
            for name in ("first_token_ms", "gap_ms", "total_ms"):
                spread = row[name]
                assert 0 <= spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["max"]
            assert row["first_token_ms"]["p50"] <= row["total_ms"]["p50"] <= 1000 * row["duration_s"]
        assert isinstance(found, dict)
        return found

    one, two = report("--clients", "1,2", "--requests", "2", "--warmup", "1")["results"]
    assert (one["clients"], two["clients"]) == (1, 2) and one["cached_tokens"] == 0
    [shared] = report("--clients", "2", "--shared-pictures", "1", "--questions", "2")["results"]
    assert shared["requests"] == 4 and shared["cached_tokens"] > 0
    new, again = report("--scenario", "idle", "--requests", "2")["results"]
    assert new["cached_tokens"] == 0 and again["cached_tokens"] > 0.5 * again["prompt_tokens"]
    arrivals = report("--scenario", "arrivals", "--clients", "2", "--requests", "1")
    [gap], [arrived] = arrivals["longest_gap_ms"], arrivals["results"]
    assert arrived["requests"] == 2 and gap >= arrivals["quiet_gap_ms"]["p50"] > 0


def test_plans_that_make_no_sense_and_servers_that_are_none() -> None:
    for arguments, word in [
        (["--clients", "1,x"], "--clients"),
        (["--pictures", "1024"], "--pictures"),
        (["--scenario", "idle"], "--pictures"),
        (["--shared-pictures", "2"], "--pictures"),
        (["--scenario", "idle", "--pictures", "8x8", "--clients", "3"], "--scenario idle"),
        (["--scenario", "arrivals", "--pictures", "8x8", "--questions", "2"], "--questions"),
    ]:
        result = bench("--base-url", "http://127.0.0.1:1", *arguments)
        assert result.exit_code == 2 and word in result.stderr, arguments
    nowhere = bench("--base-url", "http://host:x")
    assert nowhere.exit_code == 2 and "--base-url" in nowhere.stderr
    nobody = bench("--base-url", "http://127.0.0.1:1")
    assert nobody.exit_code == 1 and "127.0.0.1:1" in nobody.stderr
