"""Sweeps, open loops, traces, searches, and what the load generator says of itself: real `locust` processes against the scripted server."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from inference_service.loadtest import Loadtest
from loadgen._levels import Load
from loadgen._schedule import schedule
from loadgen._verdict import BREACHED, UNTRUSTED
from tests.service.test_loadgen import TIMEOUT_S, Stub, command, fetch, free_port, locust, result_of, start_stub, wait_for, well

__all__ = ["start_stub"]


def settings(**keys: Any) -> list[str]:
    """`--set` for keys of loadtest, with __ for the dots."""
    return [word for key, value in keys.items() for word in ("--set", f"loadtest.{key.replace('__', '.')}={json.dumps(value)}")]


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_a_sweep_measures_each_level_on_its_own(start_stub: Callable[..., Stub], tmp_path: Path, processes: list[str]) -> None:
    stub = start_stub("--first-token-s", "0.05", "--gap-s", "0.01")
    options = settings(concurrency=[1, 4, 2], repeats=2, duration_s=1, warmup_requests=1)
    ran = locust(tmp_path, "--target", stub.target, "--json-out", "out.json", *options, *processes)
    assert well(ran.returncode), ran.stderr
    result, seen = result_of(tmp_path / "out.json"), stub.stop()
    names = ["concurrency 1", "concurrency 4", "concurrency 2"]
    assert [level.name for level in result.levels] == names + [f"{name} #2" for name in names]
    for level in result.levels:
        assert level.concurrency * 0.6 <= level.mean_in_flight <= level.concurrency + 0.01
        assert level.requests.completed > level.concurrency
        assert (level.requests.failed, level.requests.cut_off) == (0, 0)
        assert level.ttft_ms.p50 is not None and level.ttft_ms.p50 >= 50
        assert level.client.streams <= level.concurrency
        assert level.client.processes == max(1, len(processes))
        assert sum(second.output_tokens for second in level.seconds) == level.tokens.output
        # Of those sent in the window, all have finished, some of them after it.
        assert sum(second.sent for second in level.seconds) == level.e2e_ms.count
        assert level.cdf["itl_ms"][-1][1] == 1
    assert [(entry.concurrency, entry.figures["ttft_ms.p50"].samples) for entry in result.repeated] == [(1, 2), (4, 2), (2, 2)]
    assert seen["peak"] == 4
    # Warm-up and drain belong to no level, and no prompt comes twice.
    assert len(seen["requests"]) > sum(level.requests.completed for level in result.levels)
    assert len({tuple(request["token_ids"]) for request in seen["requests"]}) == len(seen["requests"])
    assert all(request["outcome"] == "finished" for request in seen["requests"])


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_the_web_ui_runs_the_levels_of_the_settings(start_stub: Callable[..., Stub], tmp_path: Path, processes: list[str]) -> None:
    """Whatever number of users its form has."""
    stub, port = start_stub("--first-token-s", "0.02"), free_port()
    options = ["--target", stub.target, "--web-host", "127.0.0.1", "--web-port", str(port), "--json-out", "out.json"]
    options += settings(concurrency=[1, 3], duration_s=1)
    ui = subprocess.Popen(command(*options, *processes), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        workers = len(processes)
        wait_for(lambda: fetch(port, "/"), lambda page: f'"worker_count": {workers}' in page or not workers)
        fetch(port, "/swarm", user_count="2", spawn_rate="2", host=stub.target)
        wait_for((tmp_path / "out.json").exists)
    finally:
        ui.terminate()
        output, _ = ui.communicate(timeout=TIMEOUT_S)
    assert ui.returncode == 0, output
    levels = result_of(tmp_path / "out.json").levels
    assert [level.name for level in levels] == ["concurrency 1", "concurrency 3"]
    for level in levels:
        assert level.requests.completed > 0
        assert level.mean_in_flight <= level.concurrency + 0.01
    assert "Traceback" not in output


@pytest.mark.parametrize(("arrival", "processes"), [("constant", []), ("poisson", ["--processes", "2"])])
def test_an_open_loop_sends_its_schedule_whatever_the_service_does(
    start_stub: Callable[..., Stub], tmp_path: Path, arrival: str, processes: list[str]
) -> None:
    stub = start_stub("--first-token-s", "0.4")
    options = settings(arrival=arrival, rate=[20], duration_s=2, seed=3)
    ran = locust(tmp_path, "--target", stub.target, "--json-out", "out.json", *options, *processes)
    assert well(ran.returncode), ran.stderr
    result, seen = result_of(tmp_path / "out.json"), stub.stop()["requests"]
    (level,) = result.levels
    sent = len(seen)
    load = Load(number=0, arrival=arrival, concurrency=0, rate=20.0, repeat=0)
    planned = schedule(Loadtest(seed=3), load, [], 0, 1)
    # It ends by the clock of the process that counts, which may be late on a busy machine.
    on_time = len(list(takewhile(lambda p: p.at_s < 1.8, planned)))
    assert on_time <= sent <= 2 * on_time
    assert len({tuple(request["token_ids"]) for request in seen}) == sent
    assert (level.concurrency, level.rate) == (0, 20.0)
    # Those in flight at the end may finish.
    assert level.requests.completed == sent == level.scheduled_e2e_ms.count == level.schedule_lag_ms.count
    assert level.mean_in_flight > 3
    for scheduled, from_sending in ((level.scheduled_ttft_ms, level.ttft_ms), (level.scheduled_e2e_ms, level.e2e_ms)):
        assert scheduled.mean is not None and from_sending.mean is not None
        assert scheduled.mean >= from_sending.mean >= 400


def test_a_trace_is_replayed_to_its_end(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub()
    lengths = [(40, 3), (600, 2), (700, 4), (20, 1)]
    entries = [
        {"timestamp": 1000 * n, "input_length": input_length, "output_length": output_length, "hash_ids": [7] if input_length > 512 else []}
        for n, (input_length, output_length) in enumerate(lengths)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, entries)))
    options = settings(arrival="trace", trace="trace.jsonl", rate=[4], duration_s=0.1)
    ran = locust(tmp_path, "--target", stub.target, "--json-out", "out.json", *options, "--processes", "2")
    assert well(ran.returncode), ran.stderr
    (level,) = result_of(tmp_path / "out.json").levels
    seen = sorted(stub.stop()["requests"], key=lambda request: lengths.index((len(request["token_ids"]), request["max_tokens"])))
    assert [(len(request["token_ids"]), request["max_tokens"]) for request in seen] == lengths
    assert seen[1]["token_ids"][:512] == seen[2]["token_ids"][:512]
    assert seen[1]["token_ids"][512:600] != seen[2]["token_ids"][512:600]
    assert level.requests.completed == 4
    assert level.duration_s >= 0.75


def test_a_search_ends_at_a_load_that_meets_the_slo(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    """With 4 slots the first token of one user in 32 comes after 0.8 s."""
    stub = start_stub("--first-token-s", "0.1", "--slots", "4")
    options = settings(concurrency=[1, 32], search=True, slo__ttft_ms=400, duration_s=1, warmup_requests=1)
    ran = locust(tmp_path, "--target", stub.target, "--json-out", "out.json", *options)
    assert well(ran.returncode), ran.stderr
    result = result_of(tmp_path / "out.json")
    stub.stop()
    assert result.search is not None and result.search.best is not None
    assert 1 <= result.search.best < 32
    assert [level.concurrency for level in result.levels[:2]] == [1, 32]
    for level in result.levels:
        assert level.slo is not None
        assert level.slo.met == (level.concurrency <= result.search.best)
    assert "highest load within the SLO: " in ran.stdout


def test_a_breach_of_the_slo_is_the_exit_status(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.1")
    options = settings(slo__ttft_ms=50, concurrency=[2], duration_s=1)
    ran = locust(tmp_path, "--target", stub.target, "--json-out", "out.json", *options)
    (level,) = result_of(tmp_path / "out.json").levels
    assert level.slo is not None and (level.slo.share, level.slo.met) == (0, False)
    assert (level.requests.good, level.requests.good_per_s) == (0, 0)
    assert ran.returncode == (BREACHED if level.verdict.trusted else UNTRUSTED), ran.stderr


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_a_client_process_that_stands_still_is_not_trusted(start_stub: Callable[..., Stub], tmp_path: Path, processes: list[str]) -> None:
    """One process stands still for a second and a half, as one of an overloaded machine does; the other, if there is one, goes on."""
    stub = start_stub("--first-token-s", "0.02", "--gap-s", "0.01")
    options = ["--headless", "--target", stub.target, "--json-out", "out.json", *settings(concurrency=[2], duration_s=4), *processes]
    run = subprocess.Popen(command(*options), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: (tmp_path / "loadgen-traces.jsonl").exists())
    stalled = children(run.pid)[0] if processes else run.pid
    os.kill(stalled, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(stalled, signal.SIGCONT)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == UNTRUSTED, output
    assert "NOT TRUSTED: messages were read " in output
    result = result_of(tmp_path / "out.json")
    assert not result.verdict.trusted
    assert result.levels[0].receive_lag_ms.max is not None and result.levels[0].receive_lag_ms.max > 1000


def test_a_run_that_lost_a_process_is_not_trusted(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.02")
    options = ["--headless", "--target", stub.target, "--json-out", "out.json", "--processes", "2"]
    options += settings(concurrency=[2, 1], duration_s=2, drain_s=0)
    run = subprocess.Popen(command(*options), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: (tmp_path / "loadgen-traces.jsonl").exists())
    os.kill(children(run.pid)[0], signal.SIGKILL)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == UNTRUSTED, output
    first, second = result_of(tmp_path / "out.json").levels
    assert "1 of its processes did not report to the end" in first.verdict.reasons
    # The next level goes on with what is left.
    assert second.requests.completed > 0
    assert not any("did not report" in reason for reason in second.verdict.reasons)


def test_a_trace_ends_without_the_process_that_was_killed(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    lines = [json.dumps({"timestamp": at * 100, "input_length": 16, "output_length": 5, "hash_ids": [at]}) for at in range(30)]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    options = ["--headless", "--target", start_stub().target, "--json-out", "out.json", "--processes", "2"]
    options += settings(arrival="trace", trace="trace.jsonl", drain_s=0)
    run = subprocess.Popen(command(*options), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: (tmp_path / "loadgen-traces.jsonl").exists())
    os.kill(children(run.pid)[0], signal.SIGKILL)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == UNTRUSTED, output
    assert "1 of its processes did not report to the end" in result_of(tmp_path / "out.json").levels[0].verdict.reasons


def test_percentiles_of_four_processes_are_those_of_the_pooled_requests(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    """The raw data are the spans, which each process writes for itself."""
    stub = start_stub("--first-token-s", "0.02", "--spread-s", "0.2", "--gap-s", "0.005")
    options = ["-u", "12", "-t", "4", "--processes", "4", "--stop-timeout", "10", "--json-out", "out.json"]
    ran = locust(tmp_path, "--target", stub.target, *options)
    assert well(ran.returncode), ran.stderr
    (level,) = result_of(tmp_path / "out.json").levels
    spans = [json.loads(line) for line in (tmp_path / "loadgen-traces.jsonl").read_text().splitlines()]
    raw = {
        "ttft_ms": sorted(span["attributes"]["gen_ai.latency.time_to_first_token"] * 1e3 for span in spans),
        "e2e_ms": sorted((span["end_ns"] - span["start_ns"]) / 1e6 for span in spans),
    }
    assert level.client.processes == 4
    for name, values in raw.items():
        spread = getattr(level, name)
        assert spread.count == len(values) > 50
        assert spread.mean == pytest.approx(sum(values) / len(values), rel=1e-4)
        for percent, found in ((50, spread.p50), (90, spread.p90), (95, spread.p95), (99, spread.p99), (99.9, spread.p99_9)):
            assert found == pytest.approx(values[math.ceil(percent * len(values) / 100) - 1], rel=0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
