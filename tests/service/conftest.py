"""Real servers for the tests: processes started by the command line, on free ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from inference.v1 import inference_pb2_grpc

START_S = 120
STOP_S = 60


@dataclass
class RunningServer:
    """A server's process, its address and where its traces go."""

    process: subprocess.Popen[str]
    address: str
    traces: Path

    @property
    def engine_pid(self) -> int:
        """The engine's process: the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(child) for child in children]
        return pid

    def channel(self) -> grpc.Channel:
        """With a connection of its own: those of one process to one address share theirs otherwise, and so reach one front end."""
        return grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])

    @contextmanager
    def stub(self) -> Iterator[inference_pb2_grpc.InferenceServiceStub]:
        with self.channel() as channel:
            yield inference_pb2_grpc.InferenceServiceStub(channel)

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)


@contextmanager
def run_server(directory: Path, *settings: str, program: tuple[str, ...] = ("-m", "inference_service.cli")) -> Iterator[RunningServer]:
    """`inference-service serve` with overrides (`section.key=value`), ready to serve. `program`: what Python runs instead of it."""
    traces = directory / "traces.jsonl"
    arguments = [f"--set={setting}" for setting in ("server.port=0", f"telemetry.trace_file={traces}", *settings)]
    command = [sys.executable, *program, "serve", *arguments]
    # By the mark, processes are found that have lost their parents.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TEST_SERVER": str(directory)}
    with (directory / "server.log").open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready on "), f"not ready: {line!r}\n{(directory / 'server.log').read_text()}"
        timer.cancel()
        yield RunningServer(process, line.removeprefix("ready on ").strip(), traces)
    finally:
        timer.cancel()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose engine counts up: each token id is the one before it plus 1."""
    with run_server(tmp_path_factory.mktemp("echo"), "model.load_format=echo", "batch.max_requests=8") as server:
        yield server
