"""SIGTERM in every phase of a server's life: it ends soon, in order, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from tests.faults.leaks import Leaks, pid_of, processes
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import detail, request
from tests.service.test_lifecycle import API, NOT_SERVING, PACED, Consumer, eventually, health, load, started

ENGINE = "inference_service.engine.process"
SLOW = ("-m", "tests.faults.serve_with", "tests.faults.slow_engine")
CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
FRONT_ENDS = pytest.mark.parametrize("front_ends", [1, 2])
SOON_S = 20.0
"""Of a machine that is busy; all that the configuration lets the server wait for is far less, or far more."""


@contextmanager
def starting(directory: Path, *settings: str) -> Iterator[RunningServer]:
    """A server whose engine takes a while to load; not ready yet."""
    command = [sys.executable, *SLOW, "serve", *(f"--set={setting}" for setting in ("server.port=0", "telemetry.traces=false", *settings))]
    environment = {**os.environ, "TEST_SERVER": str(directory)}
    with (directory / "server.log").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        yield RunningServer(process, "", directory / "traces.jsonl")
    finally:
        process.kill()
        process.communicate()


def ends(server: RunningServer) -> int:
    """The exit status; asserts that no process is left."""
    status = server.process.wait(SOON_S)
    eventually(lambda: not processes(server))
    return status


@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.6])
def test_before_the_port_is_bound(tmp_path: Path, after_s: float) -> None:
    with starting(tmp_path, *PACED) as server:
        time.sleep(after_s)
        server.process.send_signal(signal.SIGTERM)
        assert ends(server) in (0, -signal.SIGTERM)


@pytest.mark.skipif(subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0, reason="no namespaces here")
def test_as_the_first_process_of_a_container_while_it_imports(tmp_path: Path) -> None:
    """Of that process the kernel drops each signal that it does not handle."""
    imports = "import time; from inference_service import cli; cli._serve = lambda args: print('on') or time.sleep(60)"
    command = [*CONTAINER, sys.executable, "-uc", f"{imports}; cli.main(['serve'])"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        os.kill(first, signal.SIGTERM)
        assert process.wait(SOON_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


@FRONT_ENDS
def test_while_the_model_is_loaded(tmp_path: Path, front_ends: int) -> None:
    with starting(tmp_path, *PACED, f"server.workers={front_ends}") as server:
        eventually(lambda: "loading slowly" in (tmp_path / "server.log").read_text())
        server.process.send_signal(signal.SIGTERM)
        assert ends(server) == 0
        assert server.process.stdout is not None and server.process.stdout.read() == "", "it has never been ready"


@FRONT_ENDS
def test_to_all_processes_at_once_as_service_managers_do(tmp_path: Path, front_ends: int) -> None:
    """When the engine has only begun: what it does about signals cannot matter."""
    with starting(tmp_path, *PACED, f"server.workers={front_ends}") as server:
        eventually(lambda: "engine" in processes(server).values())
        for pid in sorted(processes(server), reverse=True):
            os.kill(pid, signal.SIGTERM)
        assert ends(server) == 0


def test_a_server_that_is_killed_while_the_model_is_loaded_takes_the_engine_along(tmp_path: Path) -> None:
    with starting(tmp_path, *PACED) as server:
        eventually(lambda: "loading slowly" in (tmp_path / "server.log").read_text())
        server.process.kill()
        assert ends(server) == -signal.SIGKILL


@FRONT_ENDS
def test_under_load_and_once_more(tmp_path: Path, front_ends: int) -> None:
    """The first lets requests go on, the second cuts them off."""
    with run_server(tmp_path, *PACED, f"server.workers={front_ends}", "server.drain_s=1000") as server:
        leaks = Leaks(server)
        long = started(server, request([100], 2000))
        short = Consumer(server, request([100], 30))
        assert short.first.wait(30)
        server.process.send_signal(signal.SIGTERM)
        assert short.result().ids == list(range(101, 131))
        eventually(lambda: health(server, API) == NOT_SERVING)
        assert long.is_alive()
        assert server.stop() == 0
        error = long.result().error
        assert error is not None and detail(error, error_details_pb2.ErrorInfo).reason == "DRAINING"
        leaks.assert_gone()


@FRONT_ENDS
def test_while_a_lost_engine_is_started_again(tmp_path: Path, front_ends: int) -> None:
    with run_server(tmp_path, *PACED, f"server.workers={front_ends}", "server.drain_s=1000", program=SLOW) as server:
        leaks = Leaks(server)
        os.kill(pid_of(server, "engine"), signal.SIGKILL)
        eventually(lambda: health(server, API) == NOT_SERVING)
        assert server.stop() == 0
        leaks.assert_gone()


def test_while_the_engine_hangs(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.engine_timeout_s=1000", "server.drain_s=0.5") as server:
        leaks = Leaks(server)
        consumer = started(server, request([100], 1500))
        os.kill(pid_of(server, "engine"), signal.SIGSTOP)
        assert server.stop() == 0
        error = consumer.result().error
        assert error is not None and error.code() == grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "DRAINING"
        leaks.assert_gone()


def test_a_front_end_that_hangs_does_not_hold_up_a_drain(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.workers=2", "server.drain_s=0", program=("-m", "tests.faults.serve_with", ENGINE)) as server:
        leaks = Leaks(server)
        os.kill(next(pid for pid, role in processes(server).items() if role == "worker"), signal.SIGSTOP)
        assert server.stop() == 0
        leaks.assert_gone()


def test_a_killed_server_leaves_nothing(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED) as server:
        leaks = Leaks(server)
        consumer = started(server, request([100], 1500))
        assert load(server).running == 1
        server.process.kill()
        assert consumer.result().code == grpc.StatusCode.UNAVAILABLE
        leaks.assert_gone()
