"""Writes finished spans to a JSON-lines file: one compact object a span."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import format_span_id, format_trace_id

from inference_service.telemetry import names

log = logging.getLogger(__name__)


class JsonLinesExporter(SpanExporter):
    """Appends spans to a file, which is opened with the first of them.

    A batch is one write, so processes may share a file. A disk that refuses is logged once; serving goes on and those spans are lost.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file = -1
        self._torn = False
        self._complained = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        encode = msgspec.json.Encoder(enc_hook=str).encode
        # After a torn write, begin a line of our own.
        lines = (b"\n" if self._torn else b"") + b"".join(encode(span_record(span)) + b"\n" for span in spans)
        try:
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            written = os.write(self._file, lines)
        except OSError as error:
            self._complain(error.strerror or str(error))
            return SpanExportResult.FAILURE
        self._torn = written < len(lines)
        if self._torn:
            self._complain(f"only {written} of {len(lines)} bytes written")
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True

    def _complain(self, why: str) -> None:
        if not self._complained:
            self._complained = True
            log.warning("cannot write traces to %s: %s; serving goes on without them", self._path, why)


def span_record(span: ReadableSpan) -> dict[str, Any]:
    """The JSON object of a span. Ids are hexadecimal, times nanoseconds since the Unix epoch; what is empty is left out."""
    context, parent = span.get_span_context(), span.parent
    assert context is not None
    record: dict[str, Any] = {
        "trace_id": format_trace_id(context.trace_id),
        "span_id": format_span_id(context.span_id),
        "parent_id": format_span_id(parent.span_id) if parent else None,
        "service": span.resource.attributes.get(names.SERVICE_NAME, ""),
        "name": span.name,
        "kind": span.kind.name,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "status": span.status.status_code.name,
        "status_message": span.status.description,
        "attributes": dict(span.attributes or {}),
        "events": [
            {"name": event.name, "time_ns": event.timestamp, **({"attributes": dict(event.attributes)} if event.attributes else {})}
            for event in span.events
        ],
    }
    return {key: value for key, value in record.items() if value not in (None, "", {}, [])}
