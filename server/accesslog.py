"""One line in the log for each request: what was asked in shapes and numbers, and how it ended."""

from __future__ import annotations

import logging
from typing import Any

from server.logs import FIELDS
from server.telemetry import Record

logger = logging.getLogger(__name__)


def log_request(record: Record) -> None:
    """The line has method, path, status, time and counts: never a query, a header or a body."""
    shapes = {
        "images": record.images,
        "tiles": record.tiles,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }
    shapes = {name: count for name, count in shapes.items() if count}
    milliseconds = 1000 * record.seconds
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "outcome": record.outcome,
        "milliseconds": round(milliseconds, 1),
        **shapes,
    }
    logger.info(
        "%s %r %d %.0f ms id=%s%s%s",
        record.method,
        record.path,
        record.status,
        milliseconds,
        record.request_id,
        f" {record.outcome}" if record.aborted or record.broken else "",
        "".join(f" {name}={count}" for name, count in shapes.items()),
        extra={FIELDS: fields},
    )
