"""Drives one cell: the load generator as its users run it, in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import loadgen
from baselines.cells import Cell, Shape
from inference_service.config import Config

_LEAST_PROCESSES = 4
"""As soon as there are as many users: one reader alone would be late."""
_USERS_A_PROCESS = 16
_MIXED_WARMUP_S = 8.0
"""Two shapes warm up at different speeds, but their windows must lie side by side."""
_OVERHEAD_S = 60.0
"""To start, and to stop."""


class LoadError(RuntimeError):
    """The load generator did not measure; the message is its last word."""


def run_load(file: Path, config: Config, url: str, cell: Cell, directory: Path, round: str, window_s: float) -> list[dict[str, Any]]:
    """The load generator's summary for each of the cell's shapes. Raises LoadError.

    `file` is the YAML file of `config`; each `round` has prompts of its own. The warm-up, one request a user, is long over where a target
    answers within `loadtest.timeout_s`.
    """
    outputs = [directory / f"load-{part}.json" for part in range(len(cell.shapes))]
    logs = [output.with_suffix(".log") for output in outputs]
    runs: list[subprocess.Popen[bytes]] = []
    try:
        for part, shape in enumerate(cell.shapes):
            outputs[part].unlink(missing_ok=True)
            command = _command(file, config, url, cell, shape, cell.seed(config.loadtest.seed, part, round), window_s, outputs[part])
            with logs[part].open("wb") as log:
                runs.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        deadline = time.monotonic() + 2 * config.loadtest.timeout_s + _MIXED_WARMUP_S + window_s + _OVERHEAD_S
        for run in runs:
            run.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise LoadError("the load generator did not end in time") from None
    finally:
        for run in runs:
            _kill_group(run)
    return [_summary(output, log) for output, log in zip(outputs, logs, strict=True)]


def processes(cell: Cell, most: int) -> int:
    """Load generator processes for each of the cell's shapes."""
    parts = len(cell.shapes)
    wanted = max(_LEAST_PROCESSES // parts, cell.users // _USERS_A_PROCESS)
    return max(1, min(wanted, most // parts, cell.users))


def _command(file: Path, config: Config, url: str, cell: Cell, shape: Shape, seed: int, window_s: float, output: Path) -> list[str]:
    settings = {
        "loadtest.arrival": "closed",
        "loadtest.stages": [],
        "loadtest.trace": "",
        "loadtest.repeats": 1,
        "loadtest.search": False,
        "loadtest.duration_s": window_s,
        "loadtest.drain_s": 0,
        "loadtest.warmup_requests": 1,
        "loadtest.warmup_s": _MIXED_WARMUP_S if len(cell.shapes) > 1 else 0,
        "loadtest.seed": seed,
        "loadtest.workload.input_tokens": shape.input_tokens,
        "loadtest.workload.output_tokens": shape.output_tokens,
        # An answer of another length is a failed request.
        "loadtest.workload.exact_output": True,
        "loadtest.workload.temperature": cell.temperature,
        "loadtest.workload.top_p": cell.top_p,
        # A seed a row is what few ask for, and slows some samplers down.
        "loadtest.workload.seeded": False,
        "telemetry.traces": False,
    }
    command = [sys.executable, "-m", "locust", "-f", str(Path(loadgen.__file__).parent), "--headless", "--only-summary"]
    command += ["--loadgen-config", str(file), "--target", url, "-u", str(cell.users), "--json-out", str(output)]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    if (count := processes(cell, config.comparison.processes)) > 1:
        port = str(_free_port())
        command += ["--processes", str(count), "--master-bind-port", port, "--master-port", port]
    return command


def _summary(output: Path, log: Path) -> dict[str, Any]:
    """A run with failed requests has one too. Read as plain JSON, since rows are kept as such."""
    try:
        (summary,) = json.loads(output.read_text())["levels"]
    except (OSError, ValueError):
        lines = log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "ERROR" in line] or lines[-1:] or ["no output"]
        raise LoadError(f"the load generator: {errors[0]}") from None
    assert isinstance(summary, dict)
    return summary


def _kill_group(run: subprocess.Popen[bytes]) -> None:
    """The run's workers too; where all has ended, nothing is left to kill."""
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
