"""OpenTelemetry traces: one span a request, with children for its media, tokenize, queue, prefill and decode time.

Spans are made from the record of a finished request, so nothing here runs while it is served, and nothing is imported
unless `--otlp-endpoint` is set. They are sent in batches by a thread; when the collector can't keep up or is not there,
spans are dropped and requests go on. A client's `traceparent` header makes the span a part of the client's trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from server.settings import ConfigurationError
from server.telemetry import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_CONTEXT_HEADERS = (b"traceparent", b"tracestate")


class Tracing:
    """`observe` takes records; `close` sends what is left and may take seconds, so it belongs in a thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # A provider of our own, not the process's: several applications can live in one process.
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "vl2"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("vl2")

    def observe(self, record: Record) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        def nanoseconds(monotonic: float) -> int:
            return int(1e9 * (record.began_unix + monotonic - record.began))

        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in record.headers
            if name in _CONTEXT_HEADERS
        }
        span = self._tracer.start_span(
            f"{record.method} {record.route or ''}".strip(),
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            start_time=nanoseconds(record.began),
            attributes={
                "http.request.method": record.method,
                "http.route": record.route or "",
                "http.response.status_code": record.status,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "vl2.request_id": record.request_id,
                "vl2.outcome": record.outcome,
                "vl2.images": record.images,
                "vl2.tiles": record.tiles,
            },
        )
        if record.outcome in ("5xx", "broken"):
            span.set_status(Status(StatusCode.ERROR))
        parent = set_span_in_context(span)
        for phase in [*record.phases, *record.engine_phases()]:
            child = self._tracer.start_span(phase.name, context=parent, start_time=nanoseconds(phase.began))
            child.end(end_time=nanoseconds(phase.ended))
        span.end(end_time=nanoseconds(record.ended))

    def close(self) -> None:
        self._provider.shutdown()


def tracing_to(endpoint: str) -> Tracing:
    """Traces to an OpenTelemetry collector: its base URL, as in http://localhost:4318, or the whole one of its traces.

    Raises ConfigurationError when the URL is none or the extra is not installed.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigurationError(f"--otlp-endpoint: {endpoint!r} is not a URL such as http://localhost:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigurationError(f"--otlp-endpoint needs the extra: pip install 'vl2[otel]' ({error})") from error
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"
    return Tracing(OTLPSpanExporter(endpoint=url))
