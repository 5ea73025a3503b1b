"""Goodput under overload: requests answered within their deadlines, by how many come; and the server's memory meanwhile.

    python benchmarks/overload.py [--queue 256] [--deadline 2] [--varied] [--plot docs/images/overload.png]

The server's engine is paced (a step takes STEP_MS, whatever it holds), so that what it can sustain is exact: it is measured first, by a
closed loop. Then requests come at random at multiples of that rate, each with its deadline, whatever became of those before.
A short queue is full then; of a long one, deadlines keep most away.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2
from rich.console import Console
from rich.table import Table

from inference.v1 import generate_pb2 as pb
from inference.v1.inference_pb2_grpc import InferenceServiceStub

STEP_MS = 40.0
SLOTS = 8
PROMPT, ANSWER = 64, 16
LOADS = (0.5, 1.0, 2.0, 5.0, 10.0)
WARM_UP_S = 4.0
"""Of each level, not counted."""
CONNECTIONS = 4


@dataclass
class Level:
    """What became of the requests that came at one rate."""

    load: float
    seconds: float
    ends: Counter[str] = field(default_factory=Counter)
    """By outcome: "good", else the reason that the server gave, or the status."""
    refusals_s: list[float] = field(default_factory=list)
    """How long each refusal took."""
    memory: tuple[float, float] = (0.0, 0.0)
    """Resident MiB of the server's processes before and after."""
    cpu_s: float = 0.0
    """Of the server's processes, the engine's included."""

    @property
    def goodput(self) -> float:
        return self.ends["good"] / self.seconds


def serve(directory: str, queue: int) -> tuple[subprocess.Popen[str], str]:
    """A paced server, ready, and its address."""
    settings = [
        "server.port=0",
        f"telemetry.trace_file={directory}/traces.jsonl",
        "model.load_format=echo",
        f"model.echo_step_ms={STEP_MS}",
    ]
    settings += [f"batch.max_requests={SLOTS}", f"server.max_queue={queue}"]
    command = [sys.executable, "-m", "inference_service.cli", "serve", *(f"--set={setting}" for setting in settings)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().removeprefix("ready on ").strip()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in family(int(child)))]


def resident_mib(pid: int) -> float:
    """Memory of a process and all below it that is theirs alone."""
    kib = 0
    for each in family(pid):
        lines = Path(f"/proc/{each}/status").read_text().splitlines()
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
    return kib / 1024


def cpu_s(pid: int) -> float:
    """User and system time so far."""
    ticks = 0
    for each in family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


@dataclass
class Callers:
    """Who sends requests, of which kind."""

    stubs: list[Any]
    varied: bool
    """Answers' lengths are exponential, and end by a token that the server does not expect; else they are all the same and known."""

    def request(self) -> pb.GenerateRequest:
        """A prompt that no other shares. The engine counts up from its last token."""
        ids = [random.randrange(1000, 40000) for _ in range(PROMPT)]
        stopping = pb.StopConditions(max_tokens=ANSWER, ignore_eos=True)
        if self.varied:
            stopping.max_tokens = 16 * ANSWER
            stopping.stop_token_ids.append(ids[-1] + max(1, round(random.expovariate(1 / ANSWER))))
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), stopping=stopping)

    async def outcome(self, deadline_s: float) -> str:
        """Send a request and read its answer."""
        try:
            async for _ in random.choice(self.stubs).Generate(self.request(), timeout=deadline_s):
                pass
        except grpc.aio.AioRpcError as error:
            trailers: dict[str, Any] = dict(error.trailing_metadata() or ())
            info = error_details_pb2.ErrorInfo()
            for detail in status_pb2.Status.FromString(trailers.get("grpc-status-details-bin", b"")).details:
                detail.Unpack(info)
            return str(info.reason or error.code().name)
        return "good"


async def capacity(callers: Callers, seconds: float) -> float:
    """Requests a second of a closed loop that keeps every slot taken."""
    begin, ended = time.perf_counter() + WARM_UP_S, 0

    async def user() -> None:
        nonlocal ended
        while (now := time.perf_counter()) < begin + seconds:
            assert await callers.outcome(60) == "good"
            ended += begin <= now < begin + seconds

    await asyncio.gather(*(user() for _ in range(2 * SLOTS)))
    return ended / seconds


async def run_level(callers: Callers, pid: int, load: float, rate: float, deadline_s: float, seconds: float) -> Level:
    """Poisson arrivals at a rate."""
    level = Level(load, seconds)
    calls: set[asyncio.Task[None]] = set()

    async def call(counts: bool) -> None:
        begin = time.perf_counter()
        how = await callers.outcome(deadline_s)
        if counts:
            level.ends[how] += 1
            if how in ("QUEUE_FULL", "DEADLINE_UNREACHABLE"):
                level.refusals_s.append(time.perf_counter() - begin)

    begin = due = time.perf_counter()
    memory, cpu = resident_mib(pid), cpu_s(pid)
    while due < begin + WARM_UP_S + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(call(due >= begin + WARM_UP_S))
        calls.add(task)
        task.add_done_callback(calls.discard)
        due += random.expovariate(rate)
    await asyncio.gather(*calls)
    level.memory, level.cpu_s = (memory, resident_mib(pid)), cpu_s(pid) - cpu
    return level


async def run(address: str, pid: int, varied: bool, deadline_s: float, seconds: float) -> tuple[float, list[Level]]:
    """The sustainable rate, and all levels."""
    channels = [grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(CONNECTIONS)]
    callers = Callers([InferenceServiceStub(channel) for channel in channels], varied)
    sustained = await capacity(callers, seconds)
    print(f"sustained: {sustained:.1f} requests/s", flush=True)
    levels = []
    for load in LOADS:
        level = await run_level(callers, pid, load, load * sustained, deadline_s, seconds)
        print(f"{load:g} x: {level.goodput:.1f} good requests/s, {dict(level.ends)}", flush=True)
        levels.append(level)
    for channel in channels:
        await channel.close()
    return sustained, levels


def table(sustained: float, levels: list[Level], title: str) -> Table:
    """The figures of all levels."""
    made = Table(title=title)
    peak = max(level.goodput for level in levels)
    for heading in (
        "load",
        "requests/s",
        "good/s",
        "of the peak",
        "refused: full",
        "deadline",
        "late",
        "refusal ms p50, p99",
        "MiB",
        "CPU s",
    ):
        made.add_column(heading, justify="right")
    for level in levels:
        refused = {reason: level.ends[reason] / level.seconds for reason in ("QUEUE_FULL", "DEADLINE_UNREACHABLE")}
        late = (level.ends.total() - level.ends["good"]) / level.seconds - sum(refused.values())
        waits = sorted(level.refusals_s)
        waited = ", ".join(f"{waits[int(share * len(waits))] * 1000:.1f}" for share in (0.5, 0.99)) if waits else ""
        before, after = level.memory
        made.add_row(
            f"{level.load:g} x",
            f"{level.ends.total() / level.seconds:.1f}",
            f"{level.goodput:.2f}",
            f"{level.goodput / peak:.0%}",
            *(f"{rate:.1f}" for rate in refused.values()),
            f"{late:.1f}",
            waited,
            f"{before:.0f} to {after:.0f}",
            f"{level.cpu_s:.1f}",
        )
    made.caption = f"sustained by a closed loop: {sustained:.2f} requests/s"
    return made


def plot(sustained: float, levels: list[Level], path: str) -> None:
    """Goodput by load."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    loads = [level.load for level in levels]
    axes.plot(loads, [level.goodput for level in levels], marker="o", label="answered within the deadline")
    axes.axhline(sustained, color="grey", linestyle="--", label="sustained by a closed loop")
    axes.set(xlabel="load, as a multiple of the sustained rate", ylabel="requests/s", xscale="log", ylim=(0, None))
    axes.set_xticks(loads, [f"{load:g}" for load in loads])
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queue", type=int, default=256, help="server.max_queue")
    parser.add_argument("--deadline", type=float, default=2.0, help="seconds, of each request")
    parser.add_argument("--varied", action="store_true", help="answers' lengths are exponential and not known to the server")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each level")
    parser.add_argument("--plot", default="", help="a PNG")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        server, address = serve(directory, args.queue)
        try:
            sustained, levels = asyncio.run(run(address, server.pid, args.varied, args.deadline, args.seconds))
        finally:
            server.terminate()
            server.wait()
    answers = f"{ANSWER} tokens an answer{' on average' if args.varied else ''}"
    title = f"{SLOTS} slots, {STEP_MS:g} ms a step, {answers}, a queue of {args.queue}, deadlines of {args.deadline:g} s"
    Console(width=140).print(table(sustained, levels, title))
    if args.plot:
        plot(sustained, levels, args.plot)


if __name__ == "__main__":
    main()
