"""What the processes log: lines for people, or one JSON object a line, joined with traces by the ids of the request at hand."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from opentelemetry.trace import format_span_id, format_trace_id

QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class RequestIds:
    """Of the request that a task serves; the ids of trace and span are 0 when it is not traced."""

    request_id: str
    trace_id: int
    span_id: int


REQUEST: ContextVar[RequestIds | None] = ContextVar("REQUEST", default=None)
"""Set in a request's task, and so seen by all that is logged in it."""


class JsonFormatter(logging.Formatter):
    """time (RFC 3339, UTC), level, process, logger, message; exception, and the request's ids, where there are some."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if ids := REQUEST.get():
            line["request_id"] = ids.request_id
            if ids.trace_id:
                line |= {"trace_id": format_trace_id(ids.trace_id), "span_id": format_span_id(ids.span_id)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class Seldom(logging.Filter):
    """Lets OpenTelemetry repeat a complaint only once in QUIET_S: a receiver that is away would have it each second."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry."):
            return True
        what = (record.name, str(record.msg))
        if record.created < self._said.get(what, 0.0) + QUIET_S:
            return False
        self._said[what] = record.created
        return True


def configure_logs(process: str, format: Literal["text", "json"]) -> None:
    """Send this process's log to stderr; `process` is what to call it there."""
    handler = logging.StreamHandler()
    handler.addFilter(Seldom())
    text = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s")
    handler.setFormatter(JsonFormatter(process) if format == "json" else text)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
