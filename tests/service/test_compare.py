"""`python -m baselines.compare` as its users run it: real servers, real load generators."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.service.conftest import RunningServer, run_server
from tests.service.test_loadgen import ROOT, free_port
from tests.service.test_loadgen_openai import Stub

TIMEOUT_S = 240
ECHO = ["model.load_format=echo", "model.echo_step_ms=5", "cache.prefix=false"]
FIGURES = {
    "target",
    "workload",
    "concurrency",
    "requests",
    "errors",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "output_tokens_per_s",
    "receive_lag_ms",
    "distinct_experts",
    "peak_memory_gib",
    "start_s",
}


def write_config(directory: Path, targets: dict[str, dict[str, Any]], **comparison: Any) -> Path:
    tree = {
        "loadtest": {"timeout_s": 20, "workload": {"vocab_size": 900}},
        "comparison": {"targets": targets, "window_s": [1, 1], "processes": 2, **comparison},
    }
    file = directory / "experiment.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def command(file: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "baselines.compare", "--config", str(file), "--out", str(file.with_name("out")), *options]


def compare(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(file, *options), cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)


def rows(file: Path) -> list[dict[str, Any]]:
    content = json.loads((file.with_name("out") / "result.json").read_text())
    assert isinstance(content, list)
    return content


def assert_measured(ran: subprocess.CompletedProcess[str], cells: list[dict[str, Any]]) -> None:
    """All cells are good, but that this machine may have been too busy to read in time."""
    reasons = [reason for row in cells for reason in row.get("invalid", [])]
    assert all(reason.startswith("the load generator was ") for reason in reasons), ran.stdout + ran.stderr
    assert not any("failure" in row for row in cells)
    assert ran.returncode == bool(reasons), ran.stdout + ran.stderr


def served(port: int, *settings: str) -> str:
    """The command of a server of ours."""
    overrides = [f"server.port={port}", "telemetry.traces=false", *ECHO, *settings]
    return " ".join(["{python}", "-m", "inference_service.cli", "serve", *(f"--set={override}" for override in overrides)])


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(tmp_path_factory.mktemp("running"), *ECHO) as server:
        yield server


@pytest.fixture
def start_stub() -> Iterator[Callable[..., Stub]]:
    stubs: list[Stub] = []

    def start(*options: str) -> Stub:
        stubs.append(Stub(*options))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.kill()


def test_two_servers_and_what_is_missing_later(running: RunningServer, tmp_path: Path) -> None:
    """One server runs, the other is started, kept for the second run, and stopped by it."""
    port = free_port()
    targets = {"a": {"url": f"grpc://{running.address}"}, "b": {"url": f"grpc://127.0.0.1:{port}", "serve": served(port)}}
    probe = """echo '{"distinct_experts": 4.5}'"""
    targets["b"]["probe"] = probe
    file = write_config(tmp_path, targets)

    first = compare(file, "--cells", "16/4@1,2", "--keep")
    assert_measured(first, cells := rows(file))
    assert [(row["target"], row["concurrency"]) for row in cells] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    for row in cells:
        assert row.keys() >= FIGURES
        assert row["workload"] == {"input_tokens": 16, "output_tokens": 4}
        assert row["requests"] > 3
        assert row["errors"] == 0
        assert row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0
        assert row["output_tokens_per_s"] > 0
        assert row["distinct_experts"] == (4.5 if row["target"] == "b" else None)
        assert (row["start_s"] is None) == (row["target"] == "a")
    assert "a / b" in first.stdout

    assert "is there already" in (again := compare(file, "--cells", "16/4@1,2")).stderr
    assert again.returncode == 2

    more = ["--targets", "b", "--cells", "16/4@1,2;8/2+24/4@2", "--resume"]
    late = compare(file, *more, "--keep", "--time-limit", "5")
    assert late.returncode == 3
    assert rows(file) == cells

    second = compare(file, *more)
    # Its exit status is about what it was asked for.
    assert_measured(second, [row for row in rows(file) if row["target"] == "b"])
    assert rows(file)[:4] == cells
    mixed = rows(file)[4:]
    assert [(row["target"], row["workload"]["input_tokens"], row["workload"]["beside"]["input_tokens"]) for row in mixed] == [
        ("b", 8, 24),
        ("b", 24, 8),
    ]
    # It was the same process all the time, and is gone.
    assert mixed[-1]["start_s"] == cells[-1]["start_s"]
    assert not (tmp_path / "out" / "b.server.json").exists()

    report = [sys.executable, "-m", "baselines.report", str(tmp_path / "out" / "result.json"), "--markdown"]
    lines = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sum("a / b" in line for line in lines) == 2


def test_a_target_that_dies_has_a_row_that_says_so(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    doomed, other = start_stub("--first-token-s", "0.05"), start_stub("--first-token-s", "0.01")
    targets = {"doomed": {"url": f"openai://{doomed.address}"}, "other": {"url": f"http://{other.address}/v1"}}
    file = write_config(tmp_path, targets, cells="16/4@2:4 16/4@1:1")
    run = subprocess.Popen(command(file), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # The first cell runs: all processes have connected, and a user has had its first answers.
    log = tmp_path / "out" / "load-0.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "level 1: " in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    doomed.kill()
    output, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert "Traceback" not in errors
    cells = rows(file)
    assert [(row["target"], row["concurrency"], "failure" in row) for row in cells] == [
        ("doomed", 2, True),
        ("doomed", 1, True),
        ("other", 2, False),
        ("other", 1, False),
    ]
    assert cells[0]["failure"].startswith("doomed died: ")
    assert cells[1]["failure"] == f"doomed: openai://{doomed.address} does not answer"
    assert cells[0]["ttft_ms"] == {"p50": None, "p99": None}
    assert cells[2]["requests"] > 0
    assert "doomed died" in output


def test_a_server_that_cannot_start_is_named(tmp_path: Path) -> None:
    port = free_port()
    serve = "{python} -c 'import sys; sys.exit(7)'"
    file = write_config(tmp_path, {"broken": {"url": f"http://127.0.0.1:{port}/v1", "serve": serve}})
    ran = compare(file, "--cells", "16/4@1")
    assert ran.returncode == 1
    assert "broken: ended with status 7 before it was ready" in ran.stderr
    assert "ended with status 7" in rows(file)[0]["failure"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "nobody"], "--targets: nobody is not in comparison.targets, which has a"),
        (["--cells", "128x256@1"], "cells: '128x256@1': write INPUT/OUTPUT@CONCURRENCY"),
        (["--set", "comparison.window_s=3"], "comparison.window_s: "),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, options: list[str], message: str) -> None:
    ran = compare(write_config(tmp_path, {"a": {"url": "grpc://127.0.0.1:1"}}), *options)
    assert ran.returncode == 2
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr
