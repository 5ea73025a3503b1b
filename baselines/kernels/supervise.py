"""Runs a family in a process of its own, and survives it: a process that dies or falls silent ends in a row that says so."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from baselines.kernels.measure import LOST, Begun, Job, Message
from baselines.kernels.record import Record, Result

COMMAND = (sys.executable, "-m", "baselines.kernels.measure")
END_S = 10.0
"""How long a process may take to end once it has closed its output."""


class Silent(Exception):
    """No message came in time."""


class Child:
    """A process that imports all that it needs, and waits for its job."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the process
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True)
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def messages(self, job: Job, hang_s: float) -> Iterator[Message]:
        """What it says to a job, up to its end. Raises Silent."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it is dead, and its output ends at once
            self.process.stdin.write(msgspec.json.encode(job) + b"\n")
            self.process.stdin.flush()
        while True:
            try:
                line = self._lines.get(timeout=hang_s)
            except queue.Empty:
                raise Silent from None
            if not line:
                return
            with suppress(msgspec.DecodeError):  # a line cut off by its death
                yield msgspec.json.decode(line, type=Message)

    def end(self) -> int:
        """Its exit code; what is left of it and of its children is killed."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()
        return self.process.wait()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """The last line of its standard error."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((" ".join(line.split())[:300] for line in reversed(lines) if line.strip()), "")


@dataclass
class Supervisor:
    """Gives families their processes. The next one imports while the one before measures."""

    record: Record
    hang_s: float
    say: Callable[[str], None]
    command: Sequence[str] = COMMAND
    ready: Child | None = None

    def next_child(self) -> Child:
        child, self.ready = self.ready or Child(self.command), None
        return child

    def run(self, job: Job, last: bool) -> None:
        """A whole family; `last`: no other follows."""
        begin = time.monotonic()
        while True:
            child = self.next_child()
            if not last:
                self.ready = Child(self.command)
            done = [key for key, result in self.record.results.items() if result.final]
            at, how = self._listen(child, msgspec.structs.replace(job, done=done))
            if not how:
                return
            operator, backend = (at.operator, at.backend) if at else (job.operators[0], "")
            named = backend not in ("", "reference")
            rest = "; its other cases were not run" if named else "; the family was not run further"
            failure = Result(operator=operator, backend=backend or "all", case=at.case if at else "", status="failed", reason=how + rest)
            self._add(failure)
            left_s = job.budget_s - (time.monotonic() - begin)
            if not named or left_s <= 0:
                return
            job = msgspec.structs.replace(job, budget_s=left_s, excluded=[*job.excluded, (operator, backend)])

    def _listen(self, child: Child, job: Job) -> tuple[Begun | None, str]:
        """What it was at when it ended, and how it ended; empty where all is well."""
        at: Begun | None = None
        try:
            for message in child.messages(job, self.hang_s):
                if isinstance(message, Begun):
                    at = message
                else:
                    self._add(message)
        except Silent:
            child.kill()
            child.end()
            return at, f"hung: no sign of life for {self.hang_s:.0f} s"
        except BaseException:
            child.kill()
            raise
        code = child.end()
        if code == LOST:
            return at, child.last_words()
        if code:
            died = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return at, f"died {died}: {child.last_words() or 'it said nothing'}"
        return at, ""

    def _add(self, result: Result) -> None:
        self.record.add(result)
        self.say(describe(result))

    def close(self) -> None:
        if self.ready:
            self.ready.kill()
            self.ready.end()
            self.ready = None


def describe(result: Result) -> str:
    """In one line."""
    where = f"{result.operator} {result.case} {result.backend}".replace("  ", " ")
    if result.us is None:
        return f"{where}: n/a ({result.status}: {result.reason})"
    parts = [f"{result.us:.1f} us"]
    parts += [f"{result.tflops:.1f} TFLOP/s"] if result.tflops is not None else []
    parts += [f"{result.tbs:.2f} TB/s"] if result.tbs is not None else []
    parts += [f"{100 * result.share:.0f} % of {result.bound}"] if result.share is not None else []
    parts += [f"error {result.error:.1e}"] if result.error is not None else []
    parts += [f"first use {result.first_use_s:.1f} s"] if result.first_use_s else []
    return f"{where}: {', '.join(parts)}{'' if result.timed != 'stream' else ', not in a graph'}"
