"""Hands spans to their exporter: counts what it does not take, and ends in bounded time."""

from __future__ import annotations

import time
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

CLOSING_S = 3.0
"""How long the last batches may take."""


class Delivery(SpanExporter):
    """Passes batches on. `lost` counts the spans of those that failed."""

    def __init__(self, exporter: SpanExporter) -> None:
        self.lost = 0
        self._exporter = exporter
        self._closing_since = 0.0
        self._gave_up = False

    def closing(self) -> None:
        """From now on time is short: after CLOSING_S, or the first failure, what is left is lost."""
        self._closing_since = time.monotonic()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        late = self._closing_since and time.monotonic() > self._closing_since + CLOSING_S
        result = SpanExportResult.FAILURE if late or self._gave_up else self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
            self._gave_up = bool(self._closing_since)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)
