"""Everything at once, for long: `python -m tests.soak --minutes 20`.

A server with two front ends and the echo engine gets requests of every kind (traffic.py), in bursts too, while its processes are killed,
hang and pause (faults.py). Each answer must be the one that was to come, to its last id, or a beginning of it with a status that its end
explains. The engine checks its page invariants after every step (engine.py). Now and then all is let rest, and must be let go: pages,
requests, streams, tasks, spans, threads, file descriptors and sockets.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tests.faults.leaks import Leaks
from tests.fuzz.__main__ import memory_mib
from tests.service.conftest import RunningServer, run_server
from tests.service.test_lifecycle import load
from tests.soak.engine import EVERY, HELD
from tests.soak.faults import ALL, WORKERS, Fault, befall
from tests.soak.traffic import KINDS, REFUSED, Answer, Client, Kind, fault, status_of

SETTINGS = (
    "model.load_format=echo",
    "model.echo_step_ms=20",
    "cache.page_size=4",
    "cache.pages=240",
    "batch.max_requests=8",
    "server.max_queue=12",
    f"server.workers={WORKERS}",
    "server.stuck_reader_s=3",
    "server.keepalive_s=2",
    "server.engine_timeout_s=5",
    "server.engine_restarts=1000000",
    "telemetry.metrics_port=0",
)
PROGRAM = ("-m", "tests.faults.serve_with", "tests.soak.engine")
CLIENTS, BURST, BURSTS_EVERY_S = 64, 40, 20.0
THREADS = 64
"""Of all front ends together: gRPC and asyncio have pools, which grow with what is done at once up to a limit, and keep their threads."""
REPORT_EVERY_S, WATCH_EVERY_S = 10.0, 1.0
LONG_S = 600.0
"""In so long, everything happens that the kinds of requests are there for."""
MOST_GROWTH_MIB = 64.0
"""Of all the server's processes together."""


@dataclass
class Plan:
    """How long, and how hard."""

    seconds: float
    requests_per_s: float = 5.0
    fault_every_s: float = 20.0
    rest_every_s: float = 120.0
    faults: list[str] = field(default_factory=lambda: list(ALL))
    kinds: list[Kind] = field(default_factory=lambda: KINDS)
    seed: int = 0


@dataclass
class Done:
    """A request that has ended."""

    kind: Kind
    number: int
    begin: float
    end: float
    answer: Answer
    wrong: str


class Soak:
    """One run; `violations` has what must not be."""

    def __init__(self, server: RunningServer, plan: Plan, report: Callable[[str], None]) -> None:
        self.violations: list[str] = []
        self.outcomes: dict[str, Counter[str]] = {kind.run.__name__: Counter() for kind in plan.kinds}
        self.tokens = self.rests = self.pages_max = 0
        self.faults: list[Fault] = []
        self._server, self._plan, self._report = server, plan, report
        self._chance = random.Random(plan.seed)
        self._number = 0
        self._pending: list[Future[Done]] = []
        self._begin = time.monotonic()

    def run(self) -> None:
        """Raises AssertionError where the server does not recover, or does not let go of what it holds."""
        with ThreadPoolExecutor(CLIENTS) as clients, ThreadPoolExecutor(1) as fate:
            self._one_of_each(clients)
            leaks, mib = Leaks(self._server), memory_mib(self._server)
            leaks.before["threads of worker"] = THREADS
            self._begin = time.monotonic()
            while (left := self._begin + self._plan.seconds - time.monotonic()) > 0:
                self._load(clients, fate, min(left, self._plan.rest_every_s))
                self._rest()
                leaks.assert_back()
                self.rests += 1
            self._check_whole()
            self._one_of_each(clients)
            grown = memory_mib(self._server) - mib
            self._report(f"memory of the server's processes: {mib:.0f} MiB, then {grown:+.0f} MiB")
            if grown > MOST_GROWTH_MIB:
                self.violations.append(f"the server's processes grew by {grown:.0f} MiB")

    def _one_of_each(self, clients: ThreadPoolExecutor) -> None:
        """So that everything is there that the server begins with the first request of a kind."""
        for kind in self._plan.kinds:
            self._send(clients, kind)
        self._rest()

    def _load(self, clients: ThreadPoolExecutor, fate: ThreadPoolExecutor, seconds: float) -> None:
        """Load and faults for a while, until the last fault is over."""
        now = begin = time.monotonic()
        due = {"request": now, "burst": now + BURSTS_EVERY_S / 2, "fault": now + 1.0, "watch": now, "report": now + REPORT_EVERY_S}
        befalling: Future[None] | None = None
        while (now := time.monotonic()) < begin + seconds:
            if due["request"] <= now:
                due["request"] += self._chance.expovariate(self._plan.requests_per_s)
                self._send(clients)
            if due["burst"] <= now:
                due["burst"] = now + BURSTS_EVERY_S
                for _ in range(BURST):
                    self._send(clients)
            if due["fault"] <= now and (befalling is None or befalling.done()):
                due["fault"] = now + self._plan.fault_every_s
                if befalling is not None:
                    befalling.result()
                befalling = fate.submit(befall, self._server, self._next_fault(), self._chance, self.faults)
            if due["watch"] <= now:
                due["watch"] = now + WATCH_EVERY_S
                self._watch()
                self._take()
            if due["report"] <= now:
                due["report"] = now + REPORT_EVERY_S
                self._progress()
            time.sleep(0.005)
        if befalling is not None:
            befalling.result()

    def _send(self, clients: ThreadPoolExecutor, kind: Kind | None = None) -> None:
        if len(self._pending) < 4 * CLIENTS:
            kind = kind or self._chance.choices(self._plan.kinds, [each.weight for each in self._plan.kinds])[0]
            self._number += 1
            client = Client(self._server, self._number, random.Random(f"{self._plan.seed} {self._number}"))
            self._pending.append(clients.submit(one, kind, client))

    def _next_fault(self) -> str:
        """Each of them once, in random order, then again."""
        done = Counter(fault.name for fault in self.faults)
        fewest = min(done[name] for name in self._plan.faults)
        return self._chance.choice([name for name in self._plan.faults if done[name] == fewest])

    def _rest(self) -> None:
        """Until all requests have ended."""
        for future in self._pending:
            future.result()
        self._take()

    def _take(self) -> None:
        """Judge what has ended. What a fault that is not over yet excuses has ended within it, and so is excused now."""
        ended = [future.result() for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for done in ended:
            self._judge(done)

    def _judge(self, done: Done) -> None:
        name, status = done.kind.run.__name__, done.answer.status
        self.outcomes[name][status] += 1
        self.tokens += done.answer.tokens
        if done.wrong:
            self.violations.append(f"{name} {done.number}: {status}: {done.wrong}")
        if status == "OK" or status in REFUSED | done.kind.statuses:
            return
        if not status.startswith("UNAVAILABLE") or not any(fault.excuses(done.begin, done.end) for fault in self.faults):
            self.violations.append(f"{name} {done.number}: {status} after {done.end - done.begin:.1f} s, and no fault excuses it")

    def _watch(self) -> None:
        """The pages, as GetLoad tells of them."""
        begin = time.monotonic()
        try:
            told = load(self._server)
        except grpc.RpcError as error:
            if not any(fault.begin <= time.monotonic() and fault.end >= begin for fault in self.faults):
                self.violations.append(f"GetLoad: {status_of(error)}, and no fault excuses it")
            return
        self.pages_max = max(self.pages_max, told.pages_used)
        if told.pages_total and told.pages_used + told.pages_cached > told.pages_total:
            self.violations.append(f"pages: {told.pages_used} used, {told.pages_cached} cached, {told.pages_total} in all")

    def _progress(self) -> None:
        counts: Counter[str] = sum(self.outcomes.values(), Counter())
        refused = sum(counts[status] for status in REFUSED)
        self._report(
            f"{time.monotonic() - self._begin:5.0f} s: {counts.total()} requests, {counts['OK']} OK, {refused} refused, "
            f"{len(self._pending)} open; {self.tokens} tokens; {len(self.faults)} faults; at most {self.pages_max} pages; "
            f"{memory_mib(self._server):.0f} MiB; {len(self.violations)} violations"
        )

    @property
    def checks(self) -> int:
        """How often the engines found their page invariants to hold, at least."""
        return EVERY * self._log().count(HELD)

    def _check_whole(self) -> None:
        """What only the whole run can tell."""
        log = self._log()
        if "Traceback" in log:
            self.violations.append(f"the server's log has a traceback: {log[max(0, log.index('Traceback') - 500) :][:3000]}")
        for kind in self._plan.kinds if self._plan.seconds >= LONG_S else ():
            if not self.outcomes[kind.run.__name__].keys() & (kind.statuses or {"OK"}):
                self.violations.append(f"{kind.run.__name__}: what it is there for has never come about")
        if not self.checks:
            self.violations.append("the engine has not checked its page invariants")

    def _log(self) -> str:
        return (self._server.traces.parent / "server.log").read_text(errors="replace")

    def summary(self) -> list[str]:
        """A table, as lines."""
        lines = [f"{'requests':14} {'all':>6} {'OK':>6}  others"]
        for name, counts in self.outcomes.items():
            others = ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()) if status != "OK")
            lines.append(f"{name:14} {counts.total():6} {counts['OK']:6}  {others}")
        lines.append(f"{'faults':14} {'all':>6} {'longest':>7}")
        for name in self._plan.faults:
            took = [fault.end - fault.begin for fault in self.faults if fault.name == name]
            lines.append(f"{name:14} {len(took):6} {max(took, default=0):6.1f}s")
        lines.append(f"{self.tokens} tokens, none lost or twice" if not self.violations else f"{len(self.violations)} violations")
        lines.append(f"page invariants held {self.checks} times; at most {self.pages_max} pages; all let go {self.rests} times")
        return lines


def one(kind: Kind, client: Client) -> Done:
    """A request, to its end."""
    begin = time.monotonic()
    try:
        made, answer = kind.run(client)
        wrong = fault(made, answer)
    except Exception as error:
        answer, wrong = Answer("no status"), repr(error)
    return Done(kind, client.number, begin, time.monotonic(), answer, wrong)


def soak(plan: Plan, report: Callable[[str], None] = print) -> list[str]:
    """What must not be, and was."""
    with tempfile.TemporaryDirectory() as directory, run_server(Path(directory), *SETTINGS, program=PROGRAM) as server:
        run = Soak(server, plan, report)
        try:
            run.run()
            leaks = Leaks(server)
            if server.stop():
                run.violations.append(f"the server ended with status {server.process.returncode}")
            leaks.assert_gone()
        except AssertionError as error:
            run.violations.append(str(error))
        for line in [*run.summary(), *run.violations[:20]]:
            report(line)
        return run.violations


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--requests-per-s", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    plan = Plan(60 * arguments.minutes, arguments.requests_per_s, seed=arguments.seed)
    sys.exit(1 if soak(plan, lambda line: print(line, flush=True)) else 0)
