"""Telemetry that cannot get rid of what it has: serving goes on, memory is bounded, and the process ends in time."""

from __future__ import annotations

import gc
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from inference_service.config import Telemetry
from inference_service.messages import StepWork
from inference_service.telemetry import names
from inference_service.telemetry.metrics import EngineMetrics, Metrics
from inference_service.telemetry.tracing import Tracing
from tests.faults.leaks import Leaks
from tests.service.conftest import RunningServer, run_server
from tests.service.otlp_receiver import run_receiver
from tests.service.test_generate import collect, request
from tests.service.test_lifecycle import API, SERVING, eventually, health
from tests.service.test_prometheus import get, metrics_address

SOON_S = 20
"""Well below the half minute that OpenTelemetry would take by itself, and well above what it takes here."""


@contextmanager
def black_hole() -> Iterator[str]:
    """The endpoint of a receiver that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def nobody() -> Iterator[str]:
    """The endpoint of a receiver that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    yield f"http://127.0.0.1:{port}"


def lost_spans(server: RunningServer) -> float:
    found = re.search(r"^inference_telemetry_lost_spans_total (\S+)$", get(f"http://{metrics_address(server)}/metrics"), re.MULTILINE)
    assert found
    return float(found[1])


def serve_some(server: RunningServer, count: int) -> None:
    with server.stub() as stub:
        for _ in range(count):
            assert collect(stub, request([100, 101], 5))[2].usage.completion_tokens == 5


def test_a_full_disk_costs_spans_and_nothing_else(tmp_path: Path) -> None:
    with run_server(tmp_path, "model.load_format=echo", "telemetry.trace_file=/dev/full", "telemetry.metrics_port=0") as server:
        serve_some(server, 1)
        leaks = Leaks(server)
        serve_some(server, 2)
        # Of the start: it and its five phases; of a request: its server span and three children.
        eventually(lambda: lost_spans(server) == 6 + 3 * 4)
        assert health(server, "") == health(server, API) == SERVING
        leaks.assert_back()
        assert server.stop() == 0
    log = (tmp_path / "server.log").read_text()
    assert log.count("cannot write traces to /dev/full: No space left on device") == 1


@pytest.mark.parametrize("receiver", [nobody, black_hole])
def test_a_dead_collector_holds_up_neither_streams_nor_the_end(receiver: Callable[[], AbstractContextManager[str]], tmp_path: Path) -> None:
    with receiver() as endpoint:
        settings = ("model.load_format=echo", f"telemetry.otlp_endpoint={endpoint}", "telemetry.metrics_port=0")
        with run_server(tmp_path, *settings) as server:
            serve_some(server, 5)
            eventually(lambda: lost_spans(server) > 0)
            leaks = Leaks(server)
            serve_some(server, 5)
            assert health(server, "") == health(server, API) == SERVING
            leaks.assert_back()
            begin = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - begin < SOON_S


def test_memory_is_bounded_while_a_collector_does_not_answer() -> None:
    with black_hole() as endpoint:
        tracing = Tracing(Telemetry(otlp_endpoint=endpoint), names.SERVER_SERVICE)
        for _ in range(6000):
            now_ns = time.monotonic_ns()
            tracing.request((), now_ns).end(
                "OK", end_ns=now_ns + 3, scheduled_ns=now_ns, first_token_ns=now_ns + 1, last_token_ns=now_ns + 2
            )
        assert sum(issubclass(type(each), ReadableSpan) for each in gc.get_objects()) <= 16384 + 4 * 512, "a queue, and batches on the way"
        assert tracing.open_traces == 0
        stopper = threading.Thread(target=tracing.shutdown)
        stopper.start()
        stopper.join(SOON_S)
        assert not stopper.is_alive() and tracing.lost_spans >= 16384


def test_metrics_for_a_collector_that_does_not_answer_end_in_time() -> None:
    with black_hole() as endpoint:
        metrics = Metrics(Telemetry(otlp_endpoint=endpoint))
        EngineMetrics(metrics).step(StepWork(1, 1, 1, 0))
        stopper = threading.Thread(target=metrics.shutdown)
        stopper.start()
        stopper.join(SOON_S)
        assert not stopper.is_alive()


def test_a_collector_that_comes_back_gets_what_comes_then() -> None:
    with run_receiver() as receiver:
        endpoint = receiver.endpoint
        tracing = Tracing(Telemetry(otlp_endpoint=endpoint), names.SERVER_SERVICE)
        tracing.request((), 1).end("OK", end_ns=2, request_id="before")
        assert receiver.came.wait(30)
    tracing.request((), 1).end("OK", end_ns=2, request_id="meanwhile")
    eventually(lambda: tracing.lost_spans == 1)
    with run_receiver(endpoint.rpartition(":")[2]) as receiver:

        def try_again() -> bool:
            tracing.request((), 1).end("OK", end_ns=2, request_id="after")
            return receiver.came.wait(1)

        eventually(try_again, timeout=60)
        tracing.shutdown()


def test_silent_connections_to_the_metrics_port_keep_nobody_out(tmp_path: Path) -> None:
    with run_server(tmp_path, "model.load_format=echo", "telemetry.metrics_port=0") as server:
        host, _, port = metrics_address(server).partition(":")
        threads = Path(f"/proc/{server.process.pid}/task")
        before = len(list(threads.iterdir()))
        idle = [socket.create_connection((host, int(port))) for _ in range(20)]
        idle[0].sendall(b"GET /metr")
        assert lost_spans(server) == 0
        eventually(lambda: len(list(threads.iterdir())) <= before, timeout=60)
        for connection in idle:
            connection.close()
        assert server.stop() == 0


def test_a_start_that_fails_is_a_trace_of_how_far_it_got(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ["model.load_format=echo", f"telemetry.trace_file={tmp_path}/traces.jsonl"]
        for key in ("server.port", "telemetry.metrics_port"):
            arguments = [f"--set={setting}" for setting in [*settings, "server.port=0", f"{key}={port}"]]
            command = [sys.executable, "-m", "inference_service.cli", "serve", *arguments]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert ran.returncode == 1 and f"{key}: cannot listen on" in ran.stderr
            assert "Traceback" not in ran.stderr
    spans = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    starts = [span for span in spans if span["name"] == names.START_SPAN]
    assert [(span["status"], span["status_message"]) for span in starts] == [("ERROR", "the process ends before it is ready")]
    assert [span["name"] for span in spans if span.get("parent_id") == starts[0]["span_id"]] == ["imports", "tokenizer", "listen"]
