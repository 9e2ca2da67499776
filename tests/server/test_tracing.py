"""Traces: one span a request with its children, in the client's trace if it has one, and nothing when they are off."""

from __future__ import annotations

import asyncio
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from server.settings import ConfigurationError
from server.telemetry import Phase, Record, Run
from server.tracing import Tracing, tracing_to

ROOT = Path(__file__).resolve().parents[2]


def a_record(status: int = 200) -> Record:
    headers = [
        (b"authorization", b"Bearer a-secret"),
        (b"traceparent", b"00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"),
    ]
    record = Record("an-id", "POST", "/v1/chat/completions", headers, began=100.0, began_unix=1e9)
    record.status = status
    record.prompt_tokens = 7
    record.phases = [Phase("media", 100.1, 100.2), Phase("tokenize", 100.2, 100.3)]
    record.runs = [Run(submitted=100.4, queue_s=0.1, first_token=101.0, last_token=102.0, num_tokens=4)]
    record.end(route=None)
    record.ended, record.route = 102.5, "/v1/chat/completions"
    return record


def spans_of(record: Record) -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    tracing.observe(record)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_span_and_its_children() -> None:
    spans = spans_of(a_record())
    root = spans.pop("POST /v1/chat/completions")
    assert root.context is not None and root.parent is not None and root.attributes is not None
    assert root.context.trace_id == 0x0123456789ABCDEF0123456789ABCDEF
    assert root.parent.span_id == 0x0123456789ABCDEF
    assert (root.start_time, root.end_time) == (10**18, 10**18 + 2_500_000_000)
    assert root.attributes["vl2.request_id"] == "an-id"
    assert root.attributes["gen_ai.usage.input_tokens"] == 7
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert "a-secret" not in root.to_json()
    assert list(spans) == ["media", "tokenize", "queue", "prefill", "decode"]
    for span in spans.values():
        assert span.parent is not None and span.parent.span_id == root.context.span_id
    times = [(span.start_time or 0, span.end_time or 0) for span in spans.values()]
    assert [round((began - 10**18) / 1e8) for began, _ in times] == [1, 2, 4, 5, 10]
    assert [round((ended - 10**18) / 1e8) for _, ended in times] == [2, 3, 5, 10, 20]


def test_failures_are_marked() -> None:
    assert spans_of(a_record(503))["POST /v1/chat/completions"].status.status_code == StatusCode.ERROR
    assert spans_of(a_record(400))["POST /v1/chat/completions"].status.status_code == StatusCode.UNSET


def test_a_traceparent_of_nonsense() -> None:
    record = a_record()
    record.headers = [(b"traceparent", b"\xff\x00 nonsense"), (b"tracestate", b"=,=,=")]
    assert spans_of(record)["POST /v1/chat/completions"].parent is None


def test_spans_reach_a_collector() -> None:
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracing = tracing_to(f"http://127.0.0.1:{server.server_port}")
        tracing.observe(a_record())
        asyncio.run(asyncio.to_thread(tracing.close))
        server.shutdown()
        thread.join()
    [(path, _)] = received
    assert path == "/v1/traces"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://localhost", "http://"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="--otlp-endpoint"):
        tracing_to(endpoint)


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys; from server.app import create_app; from server.settings import Settings; create_app(Settings());"
        "sys.exit(any(name.startswith('opentelemetry.sdk') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
