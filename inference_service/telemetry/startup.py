"""The spans of a process's start: one trace, from the process's beginning to readiness, whose children are the phases in their order."""

from __future__ import annotations

import os
import time
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context

from inference_service.telemetry import names
from inference_service.telemetry.clock import to_unix_ns
from inference_service.telemetry.tracing import Tracing

IMPORTS, TOKENIZER, LISTEN, ENGINE_PROCESS = "imports", "tokenizer", "listen", "engine_process"
ENGINE_PHASES = {
    "loading ": "weights",
    "learning ": "memory",
    "KV cache: ": "kernels",
    "making a first token": "first_token",
}
"""The phase that the engine enters with a message that begins like this."""


class StartTrace:
    """To be told of each phase as it begins, and of the end; everything else is ignored after that."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracer = tracing.tracer
        self._start: Span | None = None
        self._phase: Span | None = None
        if self._tracer:
            began_ns = process_start_ns()
            self._start = self._tracer.start_span(names.START_SPAN, Context(), start_time=to_unix_ns(began_ns))
            self.phase(IMPORTS, began_ns)

    def phase(self, name: str, now_ns: int = 0) -> None:
        """A phase begins, and ends the one before it. `now_ns`: CLOCK_MONOTONIC, else it is read."""
        if self._tracer and self._start:
            now = to_unix_ns(now_ns or time.monotonic_ns())
            if self._phase:
                self._phase.end(now)
            self._phase = self._tracer.start_span(name, set_span_in_context(self._start, Context()), start_time=now)

    def progress(self, what: str) -> None:
        """The engine's Progress: it enters a phase, or is an event in one."""
        for beginning, phase in ENGINE_PHASES.items():
            if what.startswith(beginning):
                self.phase(phase)
        if self._phase and self._start:
            self._phase.add_event(names.PROGRESS_EVENT, {names.PROGRESS_TEXT: what})

    def end(self, error: str = "") -> None:
        """The process is ready, or could not start. Counts once."""
        start, self._start = self._start, None
        if start and self._phase:
            now = to_unix_ns(time.monotonic_ns())
            self._phase.end(now)
            if error:
                start.set_status(Status(StatusCode.ERROR, error))
            start.end(now)


def process_start_ns() -> int:
    """When this process began, in CLOCK_MONOTONIC nanoseconds, to a hundredth of a second."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 10**9 // os.sysconf("SC_CLK_TCK")
    return time.monotonic_ns() - age_ns
