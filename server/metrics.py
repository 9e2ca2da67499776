"""What Prometheus reads: gauges and counters of the engine, with fixed names and no label that a client could choose.

Counters begin at zero again when the engine is started again, as Prometheus expects of a process that restarts; the
number of these restarts is the HTTP process's own and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.engine.client import EngineClient
from server.engine.request import EngineDeadError, EngineStats

# A step that takes longer than this leaves its numbers out, rather than the scrape waiting for them.
PATIENCE_S = 5.0

_COUNTERS = [
    ("vl2_engine_steps", "Steps of the engine", "steps"),
    ("vl2_engine_step_sequences", "Sequences in these steps: by the steps, the mean batch size", "step_sequences"),
    ("vl2_prompt_tokens", "Prompt tokens computed, recomputation after preemption included", "prompt_tokens"),
    ("vl2_generated_tokens", "Tokens generated", "generated_tokens"),
    ("vl2_tiles_encoded", "Image tiles encoded", "tiles_encoded"),
    ("vl2_prefix_cache_hit_tokens", "Tokens found in cached pages instead of being computed", "prefix_hit_tokens"),
    ("vl2_vision_cache_hits", "Images whose picture was encoded already, or about to be", "vision_cache_hits"),
    ("vl2_preemptions", "Requests that lost their pages to others and started anew", "preemptions"),
    ("vl2_requests_aborted", "Requests whose client left, or that were ended for it", "aborted_requests"),
    ("vl2_requests_failed", "Requests that ended with an error of the engine", "failed_requests"),
    ("vl2_integrity_violations", "Checks of the engine's books that failed: always a bug", "integrity_errors"),
]


async def exposition(engine: EngineClient, requests: CollectorRegistry) -> bytes:
    """The engine's metrics, and those of the requests, in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(await _stats(engine), healthy=engine.healthy, restarts=engine.num_restarts))
    return generate_latest(registry) + generate_latest(requests)


async def _stats(engine: EngineClient) -> EngineStats | None:
    try:
        return await asyncio.wait_for(engine.stats(), PATIENCE_S)
    except (EngineDeadError, TimeoutError):
        return None


class EngineCollector(Collector):
    """One moment's numbers. Without stats, only what is known without asking the engine."""

    def __init__(self, stats: EngineStats | None, *, healthy: bool, restarts: int) -> None:
        self._stats = stats
        self._healthy = healthy
        self._restarts = restarts

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("vl2_engine_up", "Whether the engine is alive and answers", value=self._healthy)
        yield CounterMetricFamily("vl2_engine_restarts", "Starts of the engine after a death", value=self._restarts)
        stats = self._stats
        if stats is None:
            return
        yield _states("vl2_requests", "Requests in the engine", running=stats.running, waiting=stats.waiting)
        yield _states(
            "vl2_kv_pages",
            "Pages of the KV cache: held by requests, free but ready to be found again, or free and empty",
            used=stats.pages_total - stats.pages_free,
            cached=stats.pages_cached,
            free=stats.pages_free - stats.pages_cached,
        )
        for name, text, field in _COUNTERS:
            yield CounterMetricFamily(name, text, value=getattr(stats, field))


def _states(name: str, text: str, **values: int) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
