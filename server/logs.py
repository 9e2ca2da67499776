"""Logs, as text or JSON lines. Prompts, pictures and keys are never logged, at any level."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# The attribute of a log record that holds further fields, as a dict: `logger.info(..., extra={FIELDS: {...}})`.
FIELDS = "fields"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and the fields that came with it."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str, form: LogFormat = "text") -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # What uvicorn warns of is what any stranger can send. The lines of the others at "info" repeat what our own say.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    for name in ("httpx", "httpcore"):
        logging.getLogger(name).setLevel(logging.WARNING)


def stack_of(error: BaseException) -> str:
    """Where an exception came from, and its causes: types and places, but no messages, which may quote a prompt."""
    parts = []
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        kind = type(following)
        parts.append("".join(traceback.format_tb(following.__traceback__)) + f"{kind.__module__}.{kind.__qualname__}")
        hidden = following.__suppress_context__
        following = following.__cause__ or (None if hidden else following.__context__)
    return "\ncaused by\n".join(parts)
