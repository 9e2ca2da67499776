"""What requests leave behind: records, log lines as text and JSON, metrics of a live server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from server.accesslog import log_request
from server.engine.request import EngineRequest, TokenEvent
from server.logs import JsonFormatter, stack_of
from server.request_metrics import RequestMetrics
from server.telemetry import Record, Run, current, recording, timed
from tests.conftest import MODEL, chat_body, colour, wait_until
from tests.server.scripted import application, event, post
from tests.server.test_metrics import parse, scrape


def ended(status: int = 200, **fields: object) -> Record:
    """A record of a request that had its answer."""
    record = Record("an-id", "POST", "/v1/chat/completions", **fields)  # type: ignore[arg-type]
    record.status = status
    record.end(route=None)
    return record


def test_current_record_follows_tasks_and_threads() -> None:
    @timed("media")
    def work() -> str:
        return current().request_id

    async def request(name: str) -> list[str]:
        record = Record(name, "GET", "/")
        with recording(record), ThreadPoolExecutor(1) as pool:
            in_thread = await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, work)
            in_task = await asyncio.create_task(asyncio.to_thread(work))
        return [in_thread, in_task, *(phase.name for phase in record.phases)]

    async def run() -> list[list[str]]:
        return list(await asyncio.gather(request("a"), request("b")))

    assert asyncio.run(run()) == [["a", "a", "media", "media"], ["b", "b", "media", "media"]]
    assert current() is not current()  # nobody's


def test_phases_of_the_engine_over_several_choices() -> None:
    record = Record("", "", "")
    assert record.engine_phases() == []
    record.runs = [
        Run(submitted=10.0, queue_s=1.0, first_token=12.0, last_token=15.0, num_tokens=4),
        Run(submitted=10.5, queue_s=3.0, first_token=14.0, last_token=16.0, num_tokens=3),
        Run(submitted=10.5),  # refused
    ]
    phases = [(phase.name, phase.began, phase.ended) for phase in record.engine_phases()]
    assert phases == [("queue", 10.0, 11.0), ("prefill", 11.0, 12.0), ("decode", 12.0, 16.0)]
    assert record.completion_tokens == 7


@pytest.mark.parametrize(
    ("status", "broken", "aborted", "outcome"),
    [
        (200, False, False, "2xx"),
        (429, False, False, "4xx"),
        (503, False, False, "5xx"),
        (200, True, False, "broken"),
        (200, True, True, "aborted"),
        (499, False, False, "aborted"),
        (0, False, False, "aborted"),
    ],
)
def test_outcomes(status: int, broken: bool, aborted: bool, outcome: str) -> None:
    assert ended(status, broken=broken, aborted=aborted).outcome == outcome


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_request(ended(images=2, tiles=3, prompt_tokens=900, runs=[Run(num_tokens=5)]))
        log_request(ended(0))
    assert "id=an-id images=2 tiles=3 prompt_tokens=900 completion_tokens=5" in caplog.text
    assert "id=an-id aborted" in caplog.text
    line = json.loads(JsonFormatter().format(caplog.records[0]))
    assert line["level"] == "info" and line["logger"] == "server.accesslog" and line["time"].endswith("+00:00")
    assert (line["request_id"], line["status"], line["outcome"], line["tiles"]) == ("an-id", 200, "2xx", 3)


def test_json_lines_stay_lines() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        stack = stack_of(error)
        record = logging.makeLogRecord({"msg": "x\ny\u2028%s", "args": ("é",), "exc_info": (type(error), error, None)})
    text = JsonFormatter().format(record)
    assert len(text.splitlines()) == 1
    assert json.loads(text)["message"] == "x\ny\u2028é"
    assert stack.endswith("builtins.ValueError") and "test_json_lines_stay_lines" in stack


def test_causes_are_in_the_stack_without_their_messages() -> None:
    def inner() -> None:
        raise KeyError("prompt text")

    try:
        try:
            inner()
        except KeyError as error:
            raise ValueError("prompt" + " text") from error
    except ValueError as error:
        stack = stack_of(error)
    assert "builtins.ValueError\ncaused by\n" in stack and "in inner" in stack
    assert "prompt text'" not in stack


def test_a_request_in_the_metrics() -> None:
    registry = CollectorRegistry()
    run = Run(submitted=10.0, queue_s=1.0, first_token=12.0, last_token=15.0, num_tokens=4)
    RequestMetrics(registry).observe(ended(runs=[run], began=9.0, prompt_tokens=7, images=1, tiles=2))
    values = parse(generate_latest(registry).decode())
    assert values["vl2_queue_seconds_sum"] == 1.0
    assert values["vl2_run_seconds_sum"] == 4.0
    assert values["vl2_time_to_first_token_seconds_sum"] == 3.0
    assert values["vl2_time_per_output_token_seconds_sum"] == 1.0
    assert values["vl2_request_prompt_tokens_total"] == 7
    assert values["vl2_request_completion_tokens_total"] == 4
    assert values["vl2_request_tiles_total"] == 2
    assert values["vl2_http_requests_total 2xx none"] == 1


def test_a_live_request_in_the_metrics(client: httpx.Client) -> None:
    route = "/v1/chat/completions"
    before = scrape(client)
    body = chat_body("Count me.", colour(300, 200, "navy"), max_tokens=3, ignore_eos=True)
    usage = client.post(route, json=body).json()["usage"]
    client.post(route, json={**body, "n": 0})
    client.get("/v1/models/no/such")
    client.get("/nowhere/at/all")
    client.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    # The record of an answer is complete a moment after the answer.
    wait_until(lambda: scrape(client).get("vl2_http_requests_total 4xx none", 0) >= 2)
    after = scrape(client)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert grown(f"vl2_http_requests_total 2xx {route}") == grown(f"vl2_http_requests_total 4xx {route}") == 1
    assert grown("vl2_http_requests_total 4xx /v1/models/{name:path}") == 1
    assert grown("vl2_request_prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("vl2_request_completion_tokens_total") == 3
    assert grown("vl2_request_images_total") == grown("vl2_media_seconds_count") == 1
    assert grown("vl2_request_tiles_total") == 2
    for name in ("queue", "run", "time_to_first_token", "time_per_output_token"):
        assert grown(f"vl2_{name}_seconds_count") == 1
    assert 1 <= grown("vl2_engine_step_sequences_total") / grown("vl2_engine_steps_total") <= 32


def test_labels_do_not_grow_with_what_clients_send(client: httpx.Client) -> None:
    def names() -> set[str]:
        return {name for name in scrape(client) if not name.startswith("vl2_http_request")}

    before = names()
    for number in range(20):
        client.post("/v1/chat/completions", json={**chat_body("x"), "model": f"{MODEL}-{number}"})
        client.get(f"/v1/models/{MODEL}-{number}")
        client.get(f"/path/{number}")
        client.request(f"METHOD{number}", "/health")
    wait_until(lambda: "vl2_http_requests_total 4xx none" in scrape(client))
    assert names() == before
    assert len({name for name in scrape(client) if name.startswith("vl2_http_requests_total")}) < 30


def test_a_stream_that_breaks_is_broken(caplog: pytest.LogCaptureFixture) -> None:
    async def fails_later(request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        yield event(request, 65)
        raise ValueError("a prompt" + " in a message")

    app, _ = application(fails_later)
    with caplog.at_level(logging.INFO):
        response = post(app, "/v1/chat/completions", chat_body("x", stream=True))
    assert response.status_code == 200 and "internal_error" in response.text
    assert " broken " in caplog.text and "fails_later" in caplog.text
    assert "a prompt in a message" not in caplog.text
