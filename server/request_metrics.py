"""Prometheus metrics of requests. Labels are route templates and outcomes, so their number never grows with traffic."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from server.telemetry import Record

# Requests that are refused before the router sees them (no key, over a limit), or that no route takes.
NO_ROUTE = "none"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class RequestMetrics:
    """Counts every finished request. Call `observe` with its record."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "vl2_http_requests",
            "Finished requests. Outcome: the status class, or broken: an error after it, or aborted: the client left.",
            ("route", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "vl2_http_request_seconds",
            "From a request's head to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )

        def histogram(name: str, description: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, description, buckets=buckets, registry=registry)

        def counter(name: str, description: str) -> Counter:
            return Counter(name, description, registry=registry)

        self._media = histogram("vl2_media_seconds", "Fetching and decoding the pictures of a request.")
        self._queue = histogram("vl2_queue_seconds", "Each choice: from the engine's receipt to its first step.")
        self._run = histogram("vl2_run_seconds", "Each choice: from its first step to its last token.")
        self._first_token = histogram("vl2_time_to_first_token_seconds", "From a request's head to its first token.")
        self._per_token = histogram(
            "vl2_time_per_output_token_seconds", "Each choice: mean time between its tokens.", _TOKEN_SECONDS
        )
        self._prompt_tokens = counter("vl2_request_prompt_tokens", "Tokens of prompts, image slots included.")
        self._completion_tokens = counter("vl2_request_completion_tokens", "Tokens of answers.")
        self._images = counter("vl2_request_images", "Pictures in prompts.")
        self._tiles = counter("vl2_request_tiles", "Tiles of these pictures, the global views included.")

    def observe(self, record: Record) -> None:
        route = record.route or NO_ROUTE
        self._requests.labels(route, record.outcome).inc()
        self._seconds.labels(route).observe(record.seconds)
        media = [phase.ended - phase.began for phase in record.phases if phase.name == "media"]
        if record.images:
            self._media.observe(sum(media))
        self._prompt_tokens.inc(record.prompt_tokens)
        self._completion_tokens.inc(record.completion_tokens)
        self._images.inc(record.images)
        self._tiles.inc(record.tiles)
        first = None
        for run in record.runs:
            if run.first_token is None or run.last_token is None:
                continue
            first = run.first_token if first is None else min(first, run.first_token)
            self._queue.observe(run.queue_s)
            self._run.observe(max(0.0, run.last_token - run.submitted - run.queue_s))
            if run.num_tokens > 1:
                self._per_token.observe((run.last_token - run.first_token) / (run.num_tokens - 1))
        if first is not None:
            self._first_token.observe(first - record.began)
