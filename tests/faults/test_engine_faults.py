"""An engine that is lost, in every way there is: what clients are told, and what comes after."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_service.rpc.child import Child
from tests.faults.faulty_engine import DIES, EXHAUSTS, HANGS, RAISES
from tests.faults.leaks import Leaks, pid_of, processes
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import detail, request
from tests.service.test_lifecycle import API, NOT_SERVING, PACED, SERVING, Consumer, error_of_server, eventually, health, load, started

FAULTY = ("-m", "tests.faults.serve_with", "tests.faults.faulty_engine")
SETTINGS = (*PACED, "server.engine_timeout_s=2", "server.engine_restarts=100", "telemetry.metrics_port=0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(tmp_path_factory.mktemp("faulty"), *SETTINGS, program=FAULTY) as server:
        yield server


@pytest.fixture(scope="module")
def leaks(server: RunningServer) -> Leaks:
    for _ in range(3):
        assert started(server, request([100], 3)).result().ids == [101, 102, 103]
        health(server, "")
    return Leaks(server)


def signalled(number: signal.Signals) -> Callable[[RunningServer], None]:
    return lambda server: os.kill(pid_of(server, "engine"), number)


def computing(token_id: int) -> Callable[[RunningServer], None]:
    def inject(server: RunningServer) -> None:
        assert Consumer(server, request([token_id], 1)).result().code == grpc.StatusCode.UNAVAILABLE

    return inject


FAULTS = {
    "killed": signalled(signal.SIGKILL),
    "stopped": signalled(signal.SIGSTOP),
    "failing on the device": computing(RAISES),
    "out of memory": computing(EXHAUSTS),
    "killed in a step": computing(DIES),
    "hanging in a step": computing(HANGS),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_streams_end_with_a_status_and_serving_goes_on(server: RunningServer, leaks: Leaks, fault: str) -> None:
    consumers = [started(server, request([100], 1500)) for _ in range(3)]
    lost = pid_of(server, "engine")
    with grpc.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=API), timeout=60)
        assert next(watch).status == SERVING
        FAULTS[fault](server)
        for consumer in consumers:
            error = consumer.result().error
            assert error is not None and error.code() == grpc.StatusCode.UNAVAILABLE
            assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_LOST"
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
            assert consumer.ids == list(range(101, 101 + len(consumer.ids)))
        assert next(watch).status == NOT_SERVING
        assert health(server, "") == SERVING, "a restart of the server would not help"
        refused = error_of_server(server, request([100], 1))
        assert refused.code() == grpc.StatusCode.UNAVAILABLE and detail(refused, error_details_pb2.RetryInfo) is not None
        assert next(watch).status == SERVING
        watch.cancel()
    assert pid_of(server, "engine") != lost
    assert started(server, request([100], 50)).result().ids == list(range(101, 151))
    leaks.assert_back()


def test_an_engine_that_hangs_as_it_is_started_again_is_lost_too(server: RunningServer, leaks: Leaks) -> None:
    first = pid_of(server, "engine")
    os.kill(first, signal.SIGKILL)
    eventually(lambda: "engine" not in processes(server).values())
    eventually(lambda: "engine" in processes(server).values())
    second = pid_of(server, "engine")
    os.kill(second, signal.SIGSTOP)
    assert health(server, API) == NOT_SERVING
    eventually(lambda: health(server, API) == SERVING, timeout=60)
    assert pid_of(server, "engine") not in (first, second)
    leaks.assert_back()


def test_an_engine_lost_too_often_is_lost_for_good(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.engine_restarts=1") as server:
        leaks = Leaks(server)
        os.kill(pid_of(server, "engine"), signal.SIGKILL)
        eventually(lambda: health(server, API) == NOT_SERVING)
        eventually(lambda: health(server, API) == SERVING)
        consumer = started(server, request([100], 1500))
        os.kill(pid_of(server, "engine"), signal.SIGKILL)
        error = consumer.result().error
        assert error is not None and detail(error, error_details_pb2.RetryInfo) is None
        assert health(server, "") == health(server, API) == NOT_SERVING
        assert load(server).running == load(server).pages_used == 0
        assert "engine" not in processes(server).values()
        assert server.stop() == 0
        leaks.assert_gone()


@pytest.mark.parametrize("dead_before", [False, True])
async def test_what_a_lost_process_has_started_ends_with_it_and_is_waited_for(dead_before: bool) -> None:
    """A container's first process inherits it, and there would be more of these with each lost engine."""
    libc, subreaper = ctypes.CDLL(None), 36
    libc.prctl(subreaper, 1)
    try:
        child = Child(["sh", "-c", "sleep 1000 & wait"], stdin=subprocess.DEVNULL)
        eventually(lambda: len(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()) == 1)
        orphan = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
        if dead_before:
            os.kill(child.pid, signal.SIGKILL)
            eventually(lambda: Path(f"/proc/{child.pid}/stat").read_text().split()[2] == "Z")
        child.kill()
        await child.ended()
    finally:
        libc.prctl(subreaper, 0)
    assert not Path(f"/proc/{orphan}").exists() and not Path(f"/proc/{child.pid}").exists()
