"""`baselines.kernels` where a backend is wrong, fails, dies or hangs, or the time is over."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines.kernels.case import Bench, Case, Operator, Work
from baselines.kernels.elementwise import Norm
from baselines.kernels.machine import describe_machine
from baselines.kernels.measure import Family, Job, Message, find_impossible
from baselines.kernels.record import Record, Result, read
from baselines.kernels.supervise import Supervisor
from baselines.kernels.table import tables
from tests.unit.test_baseline_kernels import make_tiny, measure


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


class Broken(Norm):
    """Its backend is wrong, or raises."""

    def backends(self) -> list[Any]:
        right = next(backend for backend in super().backends() if backend.name == "torch")

        def wrong(made: Any, copies: list[Any], bench: Bench) -> list[Any]:
            return [lambda: torch.zeros_like(copies[0].x_TC)]

        def failing(made: Any, copies: list[Any], bench: Bench) -> list[Any]:
            raise RuntimeError("no kernel image is available")

        return [
            replace(right, row=replace(right.row, backend="zeros"), prepare=wrong),
            replace(right, row=replace(right.row, backend="raises"), prepare=failing),
            right,
        ]


class Endless(Norm):
    """No device does so much."""

    def work(self, case: Case) -> Work:
        return Work(0.0, 1e15, "float32")


def run(operator: Operator) -> list[Result]:
    found: list[Message] = []
    with torch.inference_mode():
        family = Family(Job([], None, [], 60.0), operator.bench, found.append)
        family.end += 60
        family.run_operator(operator)
    return [message for message in found if isinstance(message, Result)]


def test_a_wrong_result_has_no_time_and_a_failure_does_not_end_the_others(bench: Bench) -> None:
    results = run(Broken(bench))
    statuses = {(result.backend, result.status) for result in results}
    assert statuses == {("zeros", "wrong"), ("raises", "failed"), ("torch", "measured")}
    assert all(result.us is None for result in results if result.backend != "torch")
    assert "RuntimeError: no kernel image is available" in tables(None, results)


def test_what_is_faster_than_the_device_is_wrong(bench: Bench) -> None:
    results = [
        result for result in run(Endless(replace(bench, target=replace(bench.target, name="NVIDIA H200")))) if result.backend == "torch"
    ]
    assert results and all((result.status, result.us) == ("wrong", None) for result in results)
    assert results[0].reason.endswith("times as fast as this device can")
    assert not any(find_impossible({"us": 9.1, "share": share}) for share in (None, 0.0, 0.5, 1.05))


def test_what_is_left_out_is_said(bench: Bench) -> None:
    results = measure(bench, "sampling", without=["sort", "xqa"])
    assert {(result.backend, result.status) for result in results if result.backend in ("sort", "torch")} == {
        ("sort", "skipped"),
        ("torch", "measured"),
    }


def test_when_the_time_is_over_the_rest_is_skipped(bench: Bench) -> None:
    found: list[Message] = []
    with torch.inference_mode():
        Family(Job(["norm"], None, [], 0.0), bench, found.append).run()
    skipped = [message for message in found if isinstance(message, Result) and message.backend == "torch"]
    assert skipped and {result.status for result in skipped} == {"skipped"} and "time" in skipped[0].reason


CHILD = """
import json, os, signal, sys, time
job = json.loads(sys.stdin.readline())
def say(kind, **fields): print(json.dumps(dict(type=kind, operator="moe", **fields)), flush=True)
gone = {backend for _, backend in job["excluded"]}
say("begun")
say("result", backend="torch", case="a", status="measured", us=1.0)
if "bad" not in gone:
    say("begun", backend="bad", case="b")
    ENDING
say("result", backend="other", case="b", status="measured", us=2.0)
"""


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died by SIGSEGV: it said nothing; its other cases"),
        ("sys.exit('CUDA error: an illegal memory access was encountered')", "exit code 1: CUDA error: an illegal memory access"),
        ("time.sleep(600)", "hung: no sign of life for 2 s"),
        ("sys.stdout.write('{\"type'); sys.stdout.flush(); os._exit(9)", "died with exit code 9"),
        ("print('the device is unusable', file=sys.stderr); sys.exit(3)", "the device is unusable; its other cases"),
    ],
)
def test_a_family_that_dies_or_hangs_ends_in_a_clear_row(bench: Bench, tmp_path: Path, ending: str, reason: str) -> None:
    record = Record(tmp_path / "file", False, describe_machine(bench))
    command = [sys.executable, "-c", CHILD.replace("ENDING", ending)]
    supervisor = Supervisor(record, 2.0, lambda line: None, command)
    supervisor.run(Job(["moe"], None, [], 60.0), last=True)
    supervisor.close()
    results = {(result.backend, result.case): result for result in read(tmp_path / "file")[1]}
    assert results["bad", "b"].status == "failed" and reason in results["bad", "b"].reason
    assert results["torch", "a"].us == 1.0
    assert results["other", "b"].us == 2.0, "the others go on in a new process"
    assert not supervisor.ready
    assert reason.split(";")[0] in tables(record.machine, list(record.results.values()))


def test_a_family_that_cannot_start_ends_in_a_clear_row(bench: Bench) -> None:
    record = Record(None, False, describe_machine(bench))
    supervisor = Supervisor(record, 20.0, lambda line: None, [sys.executable, "-c", "raise ImportError('no such thing')"])
    supervisor.run(Job(["moe"], None, [], 60.0), last=False)
    supervisor.close()
    (result,) = record.results.values()
    assert (result.backend, result.status) == ("all", "failed") and "ImportError: no such thing" in result.reason
