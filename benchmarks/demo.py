"""Serves SmolLM2 on this machine, asks it a question, loads it for 20 s and shows the traces: `make demo`.

Whatever happens, Ctrl-C included, nothing is left running. Logs, traces and the summary as JSON stay in `.demo`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from rich.console import Console

from loadgen._verdict import UNTRUSTED

ROOT = Path(__file__).parents[1]
OUT = ROOT / ".demo"
LOG = OUT / "server.log"
SERVER_TRACES = OUT / "server-traces.jsonl"
CLIENT_TRACES = OUT / "client-traces.jsonl"
CONFIG = ROOT / "configs" / "cpu.yaml"
SERVICE = "inference.v1.InferenceService"
QUESTION = "What is the capital of France? Answer in one sentence."

START_S = 300
STOP_S = 60

console = Console(highlight=False)


def main() -> None:
    signal.signal(signal.SIGTERM, interrupt)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    with serving() as target:
        run("inference-service", "generate", "--target", target, QUESTION)
        run(
            *("locust", "-f", "loadgen", "--headless", "-u", "4", "-t", "20s", "--only-summary"),
            *("--loadgen-config", str(CONFIG), "--target", f"grpc://{target}"),
            *("--set", f"loadtest.trace_file={CLIENT_TRACES}", "--json-out", str(OUT / "loadtest.json")),
            # The service and its load share this machine's cores, and the load generator says so.
            accepted=(0, UNTRUSTED),
        )
    # The server has stopped, so all its spans are written.
    run("inference-service", "traces", "--slowest", "3", str(SERVER_TRACES), str(CLIENT_TRACES))


@contextmanager
def serving() -> Iterator[str]:
    """A server on a free port, ready; yields HOST:PORT. Stops it, and whatever it has started, in the end."""
    command = program("inference-service", "serve", "--config", str(CONFIG), "--set", "server.port=0")
    command += ["--set", f"telemetry.trace_file={SERVER_TRACES}"]
    show(command)
    with LOG.open("wb") as log:
        # A session of its own keeps Ctrl-C from the server: it is stopped below, after those that use it.
        server = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        with console.status("loading the model"):
            target = wait_until_ready(server)
        console.print(f"ready on {target}; its log is {LOG.relative_to(ROOT)}")
        yield target
    finally:
        stop(server)


def wait_until_ready(server: subprocess.Popen[bytes]) -> str:
    """HOST:PORT of a server whose health is SERVING. Exits with the server's log if it ends or takes too long."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        ready = re.search(r"^ready on (\S+)$", LOG.read_text(), re.MULTILINE)
        if ready and is_serving(ready[1]):
            return ready[1]
        time.sleep(0.1)
    what = f"was not ready after {START_S} s" if server.returncode is None else f"ended with status {server.returncode}"
    sys.exit(f"{LOG.read_text()}\nthe server {what}; its log is above")


def is_serving(target: str) -> bool:
    with grpc.insecure_channel(target) as channel:
        health = HealthStub(channel).Check(HealthCheckRequest(service=SERVICE), timeout=5)
    return bool(health.status == HealthCheckResponse.SERVING)


def stop(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM, which drains; in the end nothing of the server's session is left, even if it is stuck or we are interrupted."""
    try:
        server.terminate()
        console.print(f"\nserver stopped with status {server.wait(STOP_S)}")
    except subprocess.TimeoutExpired:
        sys.exit(f"the server did not stop within {STOP_S} s and was killed; its log is {LOG.relative_to(ROOT)}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def run(*command: str, accepted: tuple[int, ...] = (0,)) -> None:
    """Run one of our commands in the foreground; exits if it fails."""
    line = program(*command)
    show(line)
    if (status := subprocess.run(line, cwd=ROOT).returncode) not in accepted:
        sys.exit(f"{command[0]} failed with status {status}; the server's log is {LOG.relative_to(ROOT)}")


def program(name: str, *arguments: str) -> list[str]:
    """A command of this Python's environment."""
    return [str(Path(sys.executable).with_name(name)), *arguments]


def show(command: list[str]) -> None:
    words = [Path(command[0]).name, *command[1:]]
    console.print("\n$ " + " ".join(words).replace(f"{ROOT}/", ""), style="bold", soft_wrap=True, markup=False)


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
