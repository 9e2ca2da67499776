"""The numbers that Prometheus reads, from a live engine and from a dead one."""

from __future__ import annotations

import asyncio
from typing import cast

import httpx
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from server.engine.client import EngineClient
from server.engine.request import EngineDeadError, EngineStats
from server.metrics import exposition
from tests.conftest import MODEL, chat_body, colour, wait_until


def parse(text: str) -> dict[str, float]:
    """Values by sample name, with the state where there is one."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(client: httpx.Client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return parse(response.text)


def test_a_repeated_question_shows_as_hits(client: httpx.Client) -> None:
    wait_until(lambda: scrape(client)["vl2_requests running"] == 0)
    before = scrape(client)
    # 421 slots and some text: 6 whole pages.
    body = chat_body("What do the metrics say?", colour(300, 200, "teal"), max_tokens=2)
    usages = [client.post("/v1/chat/completions", json=body).json()["usage"] for _ in range(2)]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages] == [0, 384]
    after = scrape(client)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("vl2_prefix_cache_hit_tokens_total") == 384
    assert grown("vl2_vision_cache_hits_total") == 1
    assert grown("vl2_tiles_encoded_total") == 2
    assert grown("vl2_prompt_tokens_total") == 2 * usages[0]["prompt_tokens"] - 384
    assert after["vl2_requests running"] == after["vl2_requests waiting"] == after["vl2_kv_pages used"] == 0
    assert after["vl2_kv_pages cached"] >= 6 and after["vl2_kv_pages free"] >= 0
    assert after["vl2_engine_up"] == 1 and after["vl2_engine_restarts_total"] == 0
    assert after["vl2_integrity_violations_total"] == 0


def test_names_of_models_that_are_not_there_leave_no_trace(client: httpx.Client) -> None:
    before = scrape(client).keys()
    for number in range(20):
        client.post("/v1/chat/completions", json={**chat_body("x"), "model": f"{MODEL}-{number}"})
    assert scrape(client).keys() == before


class DeadEngine:
    healthy = False
    num_restarts = 2

    async def stats(self) -> EngineStats:
        raise EngineDeadError("gone")


def test_a_dead_engine_still_has_metrics() -> None:
    text = asyncio.run(exposition(cast(EngineClient, DeadEngine()), CollectorRegistry())).decode()
    assert parse(text) == {"vl2_engine_up": 0, "vl2_engine_restarts_total": 2}
