"""Every request of a load test leaves one trace whose parts fit together: client, server, queue, prefill and decode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from inference_service.telemetry import names
from inference_service.telemetry.spans import Request, join, read_spans
from loadgen._verdict import UNTRUSTED
from tests.service.conftest import run_server

REQUESTS = 200
ROOT = Path(__file__).parents[2]


def run_load(directory: Path) -> list[Request]:
    """Eight users for some seconds against an echo engine with few slots, so that requests queue; and the traces of both sides."""
    client_traces = directory / "client.jsonl"
    settings = ("model.load_format=echo", "model.echo_step_ms=5", "batch.max_requests=6", "batch.max_step_tokens=64", "cache.prefix=false")
    with run_server(directory, *settings) as server:
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen"), "--headless", "-u", "8", "-t", "8s", "--stop-timeout", "20"]
        command += ["--target", f"grpc://{server.address}", "--set", f"loadtest.trace_file={client_traces}"]
        command += ["--set", "loadtest.workload.input_tokens=100", "--set", "loadtest.workload.output_tokens=8"]
        ran = subprocess.run(command, timeout=120, cwd=directory)
        assert ran.returncode in (0, UNTRUSTED)
        assert server.stop() == 0
        return join(read_spans([server.traces, client_traces])[0])


def test_traces_add_up(tmp_path: Path) -> None:
    requests = run_load(tmp_path)
    assert len(requests) >= REQUESTS
    queued = 0
    for request in requests:
        client, server, phases = request.client, request.server, request.phases
        assert client is not None and server is not None, "a request has two sides"
        assert list(phases) == [names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN]
        queue, prefill, decode = phases.values()
        assert client.ttft_ns is not None and server.ttft_ns is not None
        assert client.ttft_ns - server.ttft_ns >= 0
        assert queue.duration_ns + prefill.duration_ns == server.ttft_ns
        assert queue.start_ns == server.start_ns and queue.end_ns == prefill.start_ns and prefill.end_ns == decode.start_ns
        assert client.start_ns <= server.start_ns <= server.end_ns and decode.end_ns <= server.end_ns
        queued += queue.duration_ns > prefill.duration_ns
    assert queued > 0, "some requests waited"
