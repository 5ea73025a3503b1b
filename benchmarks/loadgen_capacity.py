"""How many streamed messages a second one process of the load generator can read in time, and what a message costs it.

    python benchmarks/loadgen_capacity.py

The service with its echo engine, in other processes, sends each of 64 streams one token a step; shorter steps are more messages. Wants
a core for the load generator alone. A rate counts as sustained where the receive lag is below 20 ms at p99.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadgen._result import Level, read_result

ROOT = Path(__file__).parents[1]
STREAMS = 64
TOKENS = 400
STEPS_MS = (32.0, 16.0, 12.0, 8.0)


def serve(step_ms: float) -> tuple[subprocess.Popen[str], str]:
    """An echo server, ready, and its address."""
    settings = ["server.port=0", "telemetry.traces=false", "model.load_format=echo", f"model.echo_step_ms={step_ms}"]
    settings += [f"batch.max_requests={STREAMS}", "batch.max_step_tokens=8192", "cache.prefix=false"]
    command = [sys.executable, "-m", "inference_service.cli", "serve", *(f"--set={setting}" for setting in settings)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().removeprefix("ready on ").strip()


def measure(step_ms: float, seconds: float, core: int | None) -> Level:
    """Load the server with one process, which is kept on `core`; its only level."""
    server, address = serve(step_ms)
    try:
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "out.json"
            settings = [f"loadtest.duration_s={seconds}", "loadtest.warmup_requests=1", "telemetry.traces=false", "loadtest.drain_s=0"]
            settings += ["loadtest.workload.input_tokens=16", f"loadtest.workload.output_tokens={TOKENS}"]
            command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen"), "--headless", "--only-summary", "-u", str(STREAMS)]
            command += ["--target", f"grpc://{address}", "--json-out", str(out), *(f"--set={setting}" for setting in settings)]
            if core is not None:
                command = ["taskset", "-c", str(core), *command]
            subprocess.run(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            (level,) = read_result(out).levels
            return level
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument("--steps-ms", type=float, nargs="+", default=STEPS_MS)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    core = cores[0] if len(cores) > 1 else None
    if core is not None:
        # The servers are ours to place, and keep off that core.
        os.sched_setaffinity(0, cores[1:])
    table = Table(
        "offered/s", "messages/s", "receive lag p50 ms", "p99 ms", "core", "us a message", title=f"one process, {STREAMS} streams"
    )
    for step_ms in options.steps_ms:
        level = measure(step_ms, options.seconds, core)
        cpu, lag, pace = level.client_cpu.mean or 0.0, level.receive_lag_ms, level.client.messages_per_s
        table.add_row(
            f"{STREAMS / step_ms * 1e3:.0f}",
            f"{pace:.0f}",
            f"{lag.p50 or 0:.1f}",
            f"{lag.p99 or 0:.1f}",
            f"{cpu:.0%}",
            f"{cpu * 1e6 / pace:.0f}" if pace else "-",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
