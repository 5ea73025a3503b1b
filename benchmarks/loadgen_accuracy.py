"""Whether the load generator measures right: against a server whose delays are known, request by request.

    python benchmarks/loadgen_accuracy.py

A server that stamps at its socket lets requests wait as it is told to, and says afterwards when it sent what; the file of requests says
which of them the window holds. What the load generator says of these must be within 2 ms at p50 and 5 ms at p99. Runs with stalls then
show coordinated omission: a closed loop asks a server that stands still for nothing, and a client that stands still sends late; the
latency from when requests were due shows both. Wants a quiet machine, or `chrt -r 1` before it. The exit status is 1 where a figure is
wrong or a run is not trusted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from loadgen._result import Level, RequestRecord, Spread, read_result

ROOT = Path(__file__).parents[1]
STUB = Path(__file__).with_name("wire_stub.py")
LIMITS_MS = {"p50": 2.0, "p90": 5.0, "p99": 5.0}
STEADY = ("--first-token-s", "0.06", "--spread-s", "0.1", "--gap-s", "0.022")
"""The median first token and the median end do not come just when another request is due; those that do are late by its sending, and
are among the errors of single requests."""
COARSE = ("--first-token-s", "0.05", "--spread-s", "0.4", "--gap-s", "0.02")
STALLS = ("--first-token-s", "0.02", "--stall-s", "0.5", "--stall-every-s", "2.031", "--gap-s", "0.005")
"""Not a multiple of the time between two requests: so each stall meets them at another moment, and percentiles do not jump."""
GOOD_MS = 200.0
HIDDEN = 3.0
"""So many times larger must a p90 be that shows a stall than one that hides it."""
SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile os.getppid() == int(sys.argv[2]): pass"
"""Ends with the process that started it, however that ends."""
CLOSED = ("loadtest.concurrency=[12]",)
ONE_USER = ("loadtest.concurrency=[1]",)
SHORT = "loadtest.workload.output_tokens=2"
RATE = 20.0
OPEN = ("loadtest.arrival=constant", f"loadtest.rate=[{RATE}]")


@dataclass(frozen=True)
class Check:
    """A figure; without a limit, a yes or no."""

    run: str
    figure: str
    expected: float
    measured: float
    limit: float = 0.0

    @property
    def passed(self) -> bool:
        return abs(self.measured - self.expected) <= self.limit


@dataclass(frozen=True)
class Run:
    """What one run measured, and for each request of its window, when the server sent its tokens and its end: milliseconds from arrival."""

    level: Level
    records: list[RequestRecord]
    sent_ms: list[list[float]]

    @property
    def ttft_ms(self) -> list[float]:
        return [sent[0] for sent in self.sent_ms]

    @property
    def itl_ms(self) -> list[float]:
        return [after - before for sent in self.sent_ms for before, after in pairwise(sent[:-1])]

    @property
    def e2e_ms(self) -> list[float]:
        return [sent[-1] for sent in self.sent_ms]

    @property
    def ttft_errors_ms(self) -> list[float]:
        """Of each request, from when it was due, or else sent."""
        return [(record.first_token_unix_ns - began(record)) / 1e6 - sent[0] for record, sent in self._pairs()]

    @property
    def e2e_errors_ms(self) -> list[float]:
        return [(record.ended_unix_ns - began(record)) / 1e6 - sent[-1] for record, sent in self._pairs()]

    def _pairs(self) -> Iterator[tuple[RequestRecord, list[float]]]:
        return zip(self.records, self.sent_ms, strict=True)


@contextmanager
def awake() -> Iterator[None]:
    """A loop on each processor that runs when nothing else wants to, where the system has a priority for such.

    An idle processor sleeps, and a virtual one is lent to others meanwhile: what waits for a timer or a message then waits for its return,
    which takes milliseconds now and then. Under load there is no such sleep, so the load generator's errors are measured without it.
    """
    spinning = list[subprocess.Popen[bytes]]()
    try:
        for processor in os.sched_getaffinity(0) if hasattr(os, "SCHED_IDLE") else ():
            spinning.append(subprocess.Popen([sys.executable, "-c", SPIN, str(processor), str(os.getpid())]))
            os.sched_setscheduler(spinning[-1].pid, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        for spin in spinning:
            spin.kill()
            spin.wait()


def run(stub: Sequence[str], seconds: float, *settings: str, pause_s: float = 0.0) -> Run:
    """`pause_s`: the load generator stands still for so long, in the middle."""
    server = subprocess.Popen([sys.executable, str(STUB), *stub], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().removeprefix("ready on ").strip()
    try:
        with tempfile.TemporaryDirectory() as directory:
            command = _command(address, seconds, settings)
            load = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            if pause_s:
                _pause(load, Path(directory) / "traces.jsonl", seconds / 2, pause_s)
            load.wait()
            (level,) = read_result(Path(directory) / "out.json").levels
            records = msgspec.json.Decoder(RequestRecord).decode_lines((Path(directory) / "requests.jsonl").read_bytes())
    finally:
        server.terminate()
        seen = json.loads(server.communicate()[0])["requests"]
    sent_ms = {request["traceparent"][3:35]: [sent_s * 1e3 for sent_s in request["sent_s"]] for request in seen}
    records = [record for record in records if 0 <= began(record) - level.began_unix_ns < level.duration_s * 1e9]
    return Run(level, records, [sent_ms[record.trace_id] for record in records])


def began(record: RequestRecord) -> int:
    """What decides to which window it belongs, in ns."""
    return record.scheduled_unix_ns or record.sent_unix_ns


def _command(address: str, seconds: float, settings: Sequence[str]) -> list[str]:
    settings = [
        *(f"loadtest.duration_s={seconds}", "loadtest.warmup_s=2", "loadtest.trace_file=traces.jsonl", f"loadtest.slo.ttft_ms={GOOD_MS}"),
        *("loadtest.workload.input_tokens=16", "loadtest.workload.output_tokens=10", *settings),
    ]
    return [
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen"), "--headless", "--only-summary", "--target", f"grpc://{address}"),
        *("--json-out", "out.json", "--requests-out", "requests.jsonl", *(f"--set={setting}" for setting in settings)),
    ]


def _pause(load: subprocess.Popen[bytes], traces: Path, after_s: float, pause_s: float) -> None:
    while not traces.exists() and load.poll() is None:
        time.sleep(0.05)
    time.sleep(after_s)
    load.send_signal(signal.SIGSTOP)
    time.sleep(pause_s)
    load.send_signal(signal.SIGCONT)


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank, as the load generator's."""
    return sorted(values)[max(0, math.ceil(percent * len(values) / 100) - 1)]


def against(name: str, title: str, spread: Spread, expected_ms: Sequence[float], figures: Sequence[str] = ("p50", "p99")) -> list[Check]:
    return [
        Check(name, f"{title} {figure}", percentile(expected_ms, float(figure[1:])), getattr(spread, figure) or 0.0, LIMITS_MS[figure])
        for figure in figures
    ]


def single(name: str, title: str, errors_ms: Sequence[float]) -> list[Check]:
    """Requests' own errors, which percentiles of a whole distribution may hide."""
    return [Check(name, f"{title} {figure}", 0.0, percentile(errors_ms, float(figure[1:])), LIMITS_MS[figure]) for figure in ("p50", "p99")]


def hidden(name: str, title: str, hides: Spread, shows: Spread) -> Check:
    return Check(name, title, True, (shows.p90 or 0.0) > HIDDEN * (hides.p90 or 0.0))


def trusted(name: str, level: Level, expected: bool = True) -> Check:
    return Check(name, "trusted", expected, level.verdict.trusted)


def closed_loop(seconds: float) -> list[Check]:
    name, found = "closed loop", run(COARSE, seconds, *CLOSED)
    level = found.level
    good = sum(ttft_ms <= GOOD_MS for ttft_ms in found.ttft_ms) / len(found.ttft_ms)
    assert level.slo is not None
    pace = level.requests.completed_per_s
    return [
        *against(name, "TTFT", level.ttft_ms, found.ttft_ms),
        *against(name, "ITL", level.itl_ms, found.itl_ms),
        *against(name, "E2E", level.e2e_ms, found.e2e_ms),
        *single(name, "a request's TTFT", found.ttft_errors_ms),
        *single(name, "a request's E2E", found.e2e_errors_ms),
        Check(name, "good requests, share", good, level.slo.share or 0.0, 0.02),
        Check(name, "goodput, requests/s", good * pace, level.requests.good_per_s, 0.05 * pace),
        trusted(name, level),
    ]


def open_loop(seconds: float) -> list[Check]:
    name, found = "open loop", run(STEADY, seconds, *OPEN)
    level = found.level
    return [
        Check(name, "requests/s", RATE, level.scheduled_e2e_ms.count / level.duration_s, 0.01 * RATE),
        *against(name, "TTFT from due", level.scheduled_ttft_ms, found.ttft_ms),
        *against(name, "TTFT from sent", level.ttft_ms, found.ttft_ms),
        *against(name, "E2E from due", level.scheduled_e2e_ms, found.e2e_ms),
        *single(name, "a request's TTFT from due", found.ttft_errors_ms),
        *single(name, "a request's E2E from due", found.e2e_errors_ms),
        trusted(name, level),
    ]


def stalled_server(seconds: float) -> list[Check]:
    """It stands still for a quarter of the time, so a quarter of what is due must wait."""
    name, closed, opened = "stalled server", run(STALLS, seconds, *ONE_USER, SHORT), run(STALLS, seconds, *OPEN, SHORT)
    hides, shows = closed.level.ttft_ms, opened.level.scheduled_ttft_ms
    return [
        *against(name, "closed, TTFT from sent", hides, closed.ttft_ms, ("p50", "p90")),
        *against(name, "open, TTFT from due", shows, opened.ttft_ms, ("p50", "p90", "p99")),
        hidden(name, "p90: closed hides, open shows", hides, shows),
        trusted(name, closed.level),
        trusted(name, opened.level),
    ]


def stalled_client(seconds: float) -> list[Check]:
    """The load generator stands still for a quarter of the time: what was due is sent late, and answered fast."""
    name, level = "stalled client", run(STEADY, seconds, *OPEN, pause_s=seconds / 4).level
    return [
        hidden(name, "p90: sent hides, due shows", level.ttft_ms, level.scheduled_ttft_ms),
        trusted(name, level, expected=False),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of the five windows")
    parser.add_argument("--idle", action="store_true", help="let processors sleep where they have nothing to do")
    arguments, measures = parser.parse_args(), (closed_loop, open_loop, stalled_server, stalled_client)
    with nullcontext() if arguments.idle else awake():
        checks = [check for measure in measures for check in measure(arguments.seconds)]
    table = Table(
        "run", "figure (latencies in ms)", "expected", "measured", "error", "limit", "", box=box.SIMPLE_HEAD, collapse_padding=True
    )
    for check in checks:
        if check.limit:
            error = check.measured - check.expected
            figures = [f"{value:.2f}" for value in (check.expected, check.measured, error, check.limit)]
        else:
            figures = ["yes" if check.expected else "no", "yes" if check.measured else "no", "", ""]
        table.add_row(check.run, check.figure, *figures, "pass" if check.passed else "FAIL")
    Console().print(table)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
