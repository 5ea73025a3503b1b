"""Spans of a start: what the engine says becomes phases, in order and without gaps."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from inference_service.config import Telemetry
from inference_service.telemetry import names, startup
from inference_service.telemetry.startup import ENGINE_PHASES, StartTrace
from inference_service.telemetry.tracing import Tracing

PACKAGE = Path(startup.__file__).parents[1]
SAID = [
    "LlamaForCausalLM in bfloat16 on H200 (sm_90), 8 threads",
    "loading 134.5 M parameters (a directory)",
    "learning how much memory steps and graphs take",
    "KV cache: 4,096 pages of 16 tokens, 65,536 tokens",
    "12 graphs captured in 3.1 s",
    "making a first token",
]


@pytest.mark.parametrize("error", ["", "no such tensor"])
def test_phases_follow_each_other(error: str) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(Telemetry(), names.SERVER_SERVICE, exporter)
    trace = StartTrace(tracing)
    trace.phase(startup.ENGINE_PROCESS)
    for what in SAID:
        trace.progress(what)
    trace.end(error)
    trace.end("twice")
    trace.progress("too late")
    tracing.shutdown()
    *phases, start = exporter.get_finished_spans()
    assert [phase.name for phase in phases] == ["imports", "engine_process", "weights", "memory", "kernels", "first_token"]
    assert [len(phase.events) for phase in phases] == [0, 1, 1, 1, 2, 1]
    assert [(event.name, dict(event.attributes or {})) for event in phases[2].events] == [("progress", {"inference.progress": SAID[1]})]
    begins, ends = [phase.start_time for phase in phases], [phase.end_time for phase in phases]
    assert begins == [start.start_time, *ends[:-1]] and ends[-1] == start.end_time
    assert {phase.parent.span_id for phase in phases if phase.parent} == {start.context.span_id if start.context else 0}
    assert (start.status.status_code, start.status.description) == ((StatusCode.ERROR, error) if error else (StatusCode.UNSET, None))


def test_without_tracing_nothing_happens() -> None:
    trace = StartTrace(Tracing(Telemetry(traces=False), names.SERVER_SERVICE))
    trace.phase("x")
    trace.progress("loading")
    trace.end()


@pytest.mark.parametrize("beginning", ENGINE_PHASES)
def test_each_phase_is_one_that_the_engine_announces(beginning: str) -> None:
    sources = [path.read_text() for folder in ("engine", "execution") for path in (PACKAGE / folder).glob("*.py")]
    assert any(f'progress("{beginning}' in source or f'progress(f"{beginning}' in source for source in sources)


def test_a_process_knows_when_it_began() -> None:
    program = "from inference_service.telemetry.startup import process_start_ns; print(process_start_ns())"
    before_ns = time.monotonic_ns()
    began_ns = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout)
    tick_ns = 10**7
    assert before_ns - tick_ns <= began_ns <= time.monotonic_ns()
