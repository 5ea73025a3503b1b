"""`python -m baselines.compare` as its users run it: real servers, real load generators."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baselines.compare import main
from inference_service.telemetry.spans import read_spans
from tests.service.conftest import RunningServer, run_server
from tests.service.test_loadgen import ROOT, free_port
from tests.service.test_loadgen_openai import STUB, Stub

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
        "comparison": {"targets": targets, "window_s": [1, 1], "processes": 2, "interleave": False, **comparison},
    }
    file = directory / "experiment.yaml"
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
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
    assert ran.returncode == (1 if reasons else 0), ran.stdout + ran.stderr


def is_valid(cells: list[dict[str, Any]]) -> bool:
    return not any(row.get("invalid") for row in cells)


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


def test_two_servers_in_blocks_and_what_is_missing_later(running: RunningServer, tmp_path: Path) -> None:
    """One server runs, the other is started, kept for the second run, and stopped by it."""
    port = free_port()
    targets = {"a": {"url": f"grpc://{running.address}"}, "b": {"url": f"grpc://127.0.0.1:{port}", "serve": served(port)}}
    probe = """echo '{"distinct_experts": 4.5}'"""
    targets["b"]["probe"] = probe
    file = write_config(tmp_path, targets)

    first = compare(file, "--cells", "16/4@1", "--keep", "--block", "1")
    assert_measured(first, cells := rows(file))
    assert [(row["target"], row["block"], row["schedule"]) for row in cells] == [("a", 1, "blocks"), ("b", 1, "blocks")]
    for row in cells:
        assert row.keys() >= FIGURES
        assert row["workload"] == {"input_tokens": 16, "output_tokens": 4}
        assert row["requests"] > 3
        assert row["errors"] == 0
        assert row["ttft_ms"]["p99"] >= row["ttft_ms"]["p50"] > 0
        assert row["output_tokens_per_s"] > 0
        assert row["distinct_experts"] == (4.5 if row["target"] == "b" else None)
        assert (row["start_s"] is None) == (row["target"] == "a")
    assert ("a / b" in first.stdout) == is_valid(cells)

    assert "is there already" in (again := compare(file, "--cells", "16/4@1")).stderr
    assert again.returncode == 2

    late = compare(file, "--targets", "b", "--cells", "16/4@1;8/2+24/4@2", "--resume", "--keep", "--time-limit", "5")
    assert late.returncode == 3
    assert rows(file) == cells

    second = compare(file, "--targets", "b", "--cells", "16/4@1;8/2+24/4@2", "--resume")
    assert_measured(second, [row for row in rows(file) if row["target"] == "b"])
    kept = [row for row in cells if row["target"] == "a" or is_valid([row])]
    mixed = [row for row in rows(file) if "beside" in row["workload"]]
    plain = [row for row in rows(file) if row not in mixed]
    assert [row for row in plain if row in kept] == kept
    assert [row["target"] for row in plain] == ["a", "b"]
    assert [(row["workload"]["input_tokens"], row["workload"]["beside"]["input_tokens"]) for row in mixed] == [(8, 24), (24, 8)]
    # It was the same process all the time, and is gone.
    assert mixed[-1]["start_s"] == cells[1]["start_s"]
    assert not (tmp_path / "out" / "b.server.json").exists()

    report = [sys.executable, "-m", "baselines.report", str(tmp_path / "out" / "result.json"), "--markdown"]
    lines = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any("a / b" in line for line in lines) == is_valid(plain)


def test_a_peer_is_started_by_the_file_alone_and_its_traces_are_kept(tmp_path: Path) -> None:
    file = write_config(tmp_path, {"a": {"peer": "ours", "url": f"grpc://127.0.0.1:{free_port()}"}}, traces=True)
    ran = compare(file, "--cells", "16/4@1", *(word for setting in ECHO for word in ("--set", setting)))
    assert_measured(ran, cells := rows(file))
    assert cells[0]["peer"] == "ours" and cells[0]["version"] and cells[0]["start_s"] > 0 and cells[0]["peak_memory_gib"] > 0
    spans, _ = read_spans([tmp_path / "out" / "a.traces.jsonl"])
    assert len({span.trace_id for span in spans}) >= cells[0]["requests"]
    assert not (tmp_path / "out" / "a.server.json").exists()


def stub(port: int, *options: str) -> str:
    """The command of a scripted server."""
    return shlex.join(["{python}", str(STUB), "--port", str(port), *options])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def targets_of(commands: dict[str, Callable[[int], str]]) -> dict[str, dict[str, Any]]:
    ports = {name: free_port() for name in commands}
    return {name: {"url": f"http://127.0.0.1:{ports[name]}/v1", "serve": make(ports[name])} for name, make in commands.items()}


def test_a_comparison_that_was_ended_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interleaved, and ended by a signal after the first of its four measurements: it stops its servers, and the next run does the rest."""
    targets = targets_of({"a": lambda port: stub(port, "--gap-s", "0.01"), "b": lambda port: stub(port, "--gap-s", "0.02")})
    file = write_config(tmp_path, targets, cells="16/8@2", repeats=2, interleave=True, window_s=[0.5, 0.5], processes=1)
    # A GPU of which more is used each second, as where the other server grows: not what a server leaves.
    (smi := tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *apps*) ;; *) echo "0, GPU-a, $(( ($(date +%s) % 100000) * 2048 ))";; esac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = subprocess.Popen(command(file), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + TIMEOUT_S
    result = tmp_path / "out" / "result.json"
    while not (result.exists() and len(json.loads(result.read_text())) == 1):
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()
        time.sleep(0.05)
    pids = [json.loads((tmp_path / "out" / f"{name}.server.json").read_text())["pid"] for name in targets]
    run.terminate()
    run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 128 + signal.SIGTERM
    assert not any(map(is_alive, pids))

    before = rows(file)
    assert_measured(compare(file, "--resume"), cells := rows(file))
    # What was good, what was missing, and the rounds with an invalid row.
    there = [(row["repeat"], row["target"]) for row in before]
    anew = {row["repeat"] for row in before if not is_valid([row])}
    kept = [row for row in before if row["repeat"] not in anew]
    assert cells[: len(kept)] == kept
    order = sorted([(0, "a"), (0, "b"), (1, "b"), (1, "a")], key=lambda place: 2 * (place[0] in anew) if place in there else 1)
    assert [(row["repeat"], row["target"]) for row in cells] == order
    assert {row["schedule"] for row in cells} == {"interleaved"}
    (cell,) = json.loads((tmp_path / "out" / "report.json").read_text())["cells"]
    assert cell["figures"].keys() == {"a", "b"}
    pairs = sum(is_valid([row for row in cells if row["repeat"] == repeat]) for repeat in (0, 1))
    ratio = cell["ratios"].get("a / b", {}).get("TPOT p50 ms", {"samples": 0})
    assert ratio["samples"] == pairs
    assert pairs < 2 or ratio["low"] <= ratio["value"] <= ratio["high"]
    assert ("<svg" in (tmp_path / "out" / "report.html").read_text()) == (pairs > 0)


def test_each_fault_ends_in_a_row_and_leaves_nothing_running(tmp_path: Path) -> None:
    orphan = tmp_path / "orphan.pid"
    # Never gets ready; and a process of it has left its group and does not care for SIGTERM.
    child = (
        f"import os, signal, time; signal.signal(15, signal.SIG_IGN); open({str(orphan)!r}, 'w').write(str(os.getpid())); time.sleep(999)"
    )
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True); time.sleep(999)"
    targets = targets_of(
        {
            "good": stub,
            "short": lambda port: stub(port, "--short", "1"),
            "dying": lambda port: stub(port, "--gap-s", "0.02", "--die-at", "4"),
            "hanging": lambda port: stub(port, "--hang"),
            "stillborn": lambda port: "{python} -c 'import sys; sys.exit(7)'",
            "idle": lambda port: shlex.join(["{python}", "-c", parent]),
            # It accepts connections and says nothing.
            "mute": lambda port: shlex.join(
                ["{python}", "-c", f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(999)"]
            ),
            "absent": lambda port: "",
        }
    )
    targets["idle"]["ready_s"] = targets["mute"]["ready_s"] = 3
    targets["absent"] |= {"peer": "lorax", "program": "/nowhere/lorax-launcher"}
    file = write_config(tmp_path, targets, cells="16/4@1", interleave=False, window_s=[1, 1], processes=1)
    ran = compare(file, "--set", "loadtest.timeout_s=2", "--block", "1")
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    failures = {row["target"]: row.get("failure", "") for row in rows(file)}
    assert list(failures) == list(targets)
    starts = {
        "short": "answers are not of the 4 tokens asked for: ",
        "dying": "dying died: ",
        "hanging": "hanging hangs: not a token came in 1 s",
        "stillborn": "stillborn: ended with status 7 before it was ready; see ",
        "idle": "idle: not ready after 3 s; see ",
        "mute": "mute: not ready after 3 s; see ",
        "absent": "absent: not installed: there is no /nowhere/lorax-launcher; it comes with the container ",
    }
    assert failures["good"] == ""
    for name, start in starts.items():
        assert failures[name].startswith(start), failures[name]
    assert not any(" / " in name for cell in json.loads((tmp_path / "out" / "report.json").read_text())["cells"] for name in cell["ratios"])
    assert not is_alive(int(orphan.read_text()))
    assert not list((tmp_path / "out").glob("*.server.json"))
    for target in targets.values():
        with socket.socket() as sock:
            assert sock.connect_ex(("127.0.0.1", int(target["url"].split(":")[2].split("/")[0]))) != 0


def test_a_target_that_dies_has_a_row_that_says_so(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    doomed, other = start_stub("--first-token-s", "0.05"), start_stub("--first-token-s", "0.01")
    targets = {"doomed": {"url": f"openai://{doomed.address}"}, "other": {"url": f"http://{other.address}/v1"}}
    file = write_config(tmp_path, targets, cells="16/4@2:4 16/4@1:1")
    run = subprocess.Popen(command(file, "--block", "1"), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--targets", "nobody"], "--targets: nobody is not in comparison.targets, which has a"),
        (["--cells", "128x256@1"], "cells: '128x256@1': write INPUT/OUTPUT@CONCURRENCY"),
        (["--set", "comparison.window_s=3"], "comparison.window_s: "),
        (["--set", "comparison.targets.a.peer=theirs"], "comparison.targets"),
        (["--targets", "a,a"], "--targets: a is there twice"),
        (["--cells", "16/4@1,1"], "--cells: 16/4@1 is there twice"),
        (["--set", "comparison.cells=8/4+16/4@2:9 16/4+8/4@2"], "comparison.cells: 16/4+8/4@2 is there twice"),
        (["--repeats", "0"], "--repeats: 0 is less than 1"),
        (["--block", "2", "--set", "comparison.interleave=true"], "--block: interleaved servers have no blocks"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    file = write_config(tmp_path, {"a": {"url": "grpc://127.0.0.1:1"}})
    with pytest.raises(SystemExit) as ended:
        main(command(file, *options)[3:])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
