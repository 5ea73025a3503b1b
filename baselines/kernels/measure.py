"""One family of operators in a process of its own: reads its job from standard input, and writes what it finds to standard output.

A job is a line of JSON, and so is each message: what is begun, then what became of it. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, BinaryIO

import msgspec
import torch

from baselines.kernels.attention import AttentionDecode, AttentionMixed, AttentionPrefill
from baselines.kernels.case import SMALL, TOLERANCES, Backend, Bench, Case, Operator
from baselines.kernels.elementwise import KvAppend, Norm, Rope
from baselines.kernels.gemm import Fp8Gemm, Gemm
from baselines.kernels.limits import limits_of
from baselines.kernels.machine import make_bench
from baselines.kernels.moe import Fp8Experts, Moe
from baselines.kernels.record import Key, Result
from baselines.kernels.routing import Routing
from baselines.kernels.sampling import Sampling
from baselines.kernels.timing import Timing, copies_for, measure

OPERATORS: tuple[type[Operator], ...] = (
    AttentionDecode,
    AttentionPrefill,
    AttentionMixed,
    Moe,
    Fp8Experts,
    Gemm,
    Fp8Gemm,
    Routing,
    Sampling,
    Norm,
    Rope,
    KvAppend,
)
FIRST_USE_S = 1.0
"""A first use that takes longer compiles or loads, and does not count against the budget."""
MOST_SHARE = 1.2
"""Of a limit; a little more than all where some inputs are still in the cache."""
LOST = 3
"""The exit code where an error has left the device unusable."""


class Job(msgspec.Struct, frozen=True):
    operators: list[str]
    config: str | None
    overrides: list[str]
    budget_s: float
    without: list[str] = []
    """Backends that nobody wants to see."""
    done: list[Key] = []
    excluded: list[tuple[str, str]] = []
    """Backends, each after its operator, that ended the process before."""
    small: bool = False
    """The sizes for a CPU, on a GPU too: to see whether backends are right, not how fast they are."""


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    operator: str
    backend: str = ""
    case: str = ""


Message = Begun | Result
Send = Callable[[Message], None]


class Family:
    """Runs a job."""

    def __init__(self, job: Job, bench: Bench, send: Send) -> None:
        self.job, self.bench, self.send = job, bench, send
        self.done, self.used = set(job.done), set[tuple[str, str]]()
        self.end = time.monotonic()

    def run(self) -> None:
        begin, budget = time.monotonic(), self.job.budget_s
        makers = {operator.name: operator for operator in OPERATORS}
        for index, name in enumerate(self.job.operators):
            left = begin + budget - time.monotonic()
            self.end = time.monotonic() + left / (len(self.job.operators) - index)
            before = self.end
            self.send(Begun(name))
            self.run_operator(makers[name](self.bench))
            begin += self.end - before  # first uses

    def run_operator(self, operator: Operator) -> None:
        cases, able = operator.cases(), list[Backend]()
        for backend in operator.backends():
            if (operator.name, backend.name) in self.job.excluded:
                continue
            refusal = backend.row.refusal(self.bench.setting)
            if backend.name in self.job.without:
                self.conclude(Result(operator=operator.name, backend=backend.name, status="skipped", reason="left out by --without"))
            elif refusal:
                self.conclude(Result(operator=operator.name, backend=backend.name, status="unsupported", reason=refusal))
            else:
                able.append(backend)
        if not cases:
            reason = "the model has no such operator, or its contexts are too short"
            self.conclude(Result(operator=operator.name, backend="all", status="unsupported", reason=reason))
        makes = dict[str, object]()
        for case in cases:
            self.run_case(operator, case, able, makes)

    def run_case(self, operator: Operator, case: Case, able: list[Backend], makes: dict[str, object]) -> None:
        wanted = list[Backend]()
        for backend in able:
            if (operator.name, backend.name, case.name) in self.done:
                continue
            if limit := backend.limit(case):
                self.conclude(self.result(operator, case, backend, "unsupported", f"{operator.name} by {backend.name} {limit}"))
            elif time.monotonic() > self.end:
                self.conclude(self.result(operator, case, backend, "skipped", "the time that the family was given was over"))
            else:
                wanted.append(backend)
        if not wanted:
            return
        self.send(Begun(operator.name, "reference", case.name))
        if self.bench.device.type == "cuda":
            torch.cuda.empty_cache()  # of the graphs of the case before
        try:
            copies = operator.make(case, copies_for(operator.work(case), self.bench.device))
            expected = operator.reference(copies[0])
        except Exception as error:
            self.check_device(error)
            for backend in wanted:
                self.conclude(self.result(operator, case, backend, "failed", f"no inputs, or no reference: {describe(error)}"))
            return
        for backend in wanted:
            self.send(Begun(operator.name, backend.name, case.name))
            try:
                result = self.run_backend(operator, case, backend, operator.fresh(copies), expected, makes)
            except Exception as error:
                self.conclude(self.result(operator, case, backend, "failed", describe(error)))
                self.check_device(error)
            else:
                self.conclude(result)

    def run_backend(
        self, operator: Operator, case: Case, backend: Backend, copies: list[object], expected: torch.Tensor, makes: dict[str, object]
    ) -> Result:
        begin = time.monotonic()
        if backend.name not in makes:
            makes[backend.name] = backend.row.make()
        calls = backend.prepare(makes[backend.name], copies, self.bench)
        output = calls[0]()
        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
        took, first_use_s = time.monotonic() - begin, None
        if (operator.name, backend.name) not in self.used:
            self.used.add((operator.name, backend.name))
            first_use_s = round(took, 2)
        if took > FIRST_USE_S:
            self.end += took
        error = operator.error(copies[0], output, expected)
        tolerance = TOLERANCES[self.bench.dtype] if backend.tolerance is None else backend.tolerance
        extra = {"error": error if error == error else None, "tolerance": tolerance, "first_use_s": first_use_s}
        if not error <= tolerance:
            reason = f"is wrong: {operator.unit} {error:.1e}, at most {tolerance:.0e} is allowed"
            return self.result(operator, case, backend, "wrong", f"{operator.name} by {backend.name} {reason}", **extra)
        del output
        figures = self.figures(operator, case, measure(calls, self.bench.device, backend.capturable))
        if too_fast := find_impossible(figures):
            return self.result(operator, case, backend, "wrong", f"{operator.name} by {backend.name} {too_fast}", **extra)
        return self.result(operator, case, backend, "measured", "", **extra, **figures)

    def figures(self, operator: Operator, case: Case, timing: Timing) -> dict[str, Any]:
        work, limits = operator.work(case), limits_of(self.bench.target.name)
        bound_us, bound = limits.bound_us(work) if limits else (None, "")
        return {
            "us": timing.us,
            "timed": timing.timed,
            "tflops": work.flops / timing.us / 1e6 if work.flops else None,
            "tbs": work.bytes / timing.us / 1e6,
            "share": None if bound_us is None else bound_us / timing.us,
            "bound": bound,
        }

    def result(self, operator: Operator, case: Case, backend: Backend, status: str, reason: str, **figures: object) -> Result:
        fields = {"operator": operator.name, "backend": backend.name, "case": case.name, "kind": case.kind, "sizes": dict(case.sizes)}
        return msgspec.convert({**fields, "status": status, "reason": reason, "note": backend.note, **figures, "type": "result"}, Result)

    def conclude(self, result: Result) -> None:
        if result.key not in self.done:
            self.send(result)

    def check_device(self, error: Exception) -> None:
        """End the process where an error sticks to the device: nothing after it could be believed."""
        if self.bench.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device=self.bench.device).item()
            torch.cuda.empty_cache()
        except Exception:
            print(f"the device is unusable after {describe(error)}", file=sys.stderr, flush=True)
            sys.stderr.flush()
            os._exit(LOST)


def find_impossible(figures: Mapping[str, Any]) -> str:
    """Why these are no figures of the whole work; empty where they may be.

    A graph may hold less than a call does: FlashInfer clears POD's counters outside of it, so that all replays but the first do nothing.
    """
    share = figures["share"]
    return f"took {figures['us']:.1f} us, {share:.1f} times as fast as this device can" if share and share > MOST_SHARE else ""


def describe(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def main() -> None:
    out = take_stdout()
    if find_spec("flashinfer"):
        with suppress(Exception):  # which each backend that needs it then meets again
            import_module("baselines.kernels.flashinfer_calls")
    encoder = msgspec.json.Encoder()

    def send(message: Message) -> None:
        out.write(encoder.encode(message) + b"\n")
        out.flush()

    line = sys.stdin.readline()
    if not line.strip():
        return  # whoever started it has changed his mind
    job = msgspec.json.decode(line, type=Job)
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = make_bench(job.config, job.overrides)
        Family(job, replace(bench, grid=SMALL) if job.small else bench, send).run()


def take_stdout() -> BinaryIO:
    """Standard output for messages alone; what else is printed there goes to standard error."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


if __name__ == "__main__":
    main()
