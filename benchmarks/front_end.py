"""What the front end costs: CPU time of the server's process a streamed message, with the echo engine behind it.

    python benchmarks/front_end.py

Two kinds of run. Paced: every step's token travels in a message of its own. Flat out: the engine is faster than the front end, so
deltas merge. The engine and the clients are other processes; only the front end's CPU time is counted (user + system, all its
threads). The least of some runs is given, since whatever else the machine does can only add.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
from rich.console import Console
from rich.table import Table

from inference.v1 import generate_pb2 as pb
from inference.v1 import inference_pb2_grpc

STREAMS = 64
TOKENS = 400
PROMPT = 1000
RUNS = 5


async def drive(address: str) -> tuple[int, int]:
    """All streams at once; messages and tokens received."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one() -> tuple[int, int]:
            messages = tokens = 0
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=[PROMPT]), stopping=pb.StopConditions(max_tokens=TOKENS, ignore_eos=True)
            )
            async for response in stub.Generate(request, timeout=120):
                messages += 1
                tokens += len(response.delta.token_ids)
            return messages, tokens

        counts = await asyncio.gather(*(one() for _ in range(STREAMS)))
    return sum(messages for messages, _ in counts), sum(tokens for _, tokens in counts)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pin(pid: int, cores: set[int]) -> None:
    """Keep all threads of a process on some cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


def separate(server: int) -> None:
    """The front end on one core, its engine and this client on the others: its CPU time is to be its own, not that of contention."""
    first, *others = sorted(os.sched_getaffinity(0))
    if others:
        (engine,) = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
        pin(server, {first})
        pin(engine, set(others))
        pin(os.getpid(), set(others))


def measure(step_ms: float, directory: str) -> tuple[int, int, float, float]:
    """Messages, tokens, front-end CPU seconds and wall seconds of the cheapest of some runs, after a warm-up run."""
    settings = [
        "model.load_format=echo",
        f"model.echo_step_ms={step_ms}",
        f"batch.max_requests={STREAMS}",
        "server.port=0",
        f"telemetry.trace_file={directory}/traces.jsonl",
    ]
    command = [sys.executable, "-m", "inference_service.cli", "serve", *(f"--set={setting}" for setting in settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("ready on ").strip()
        separate(process.pid)
        asyncio.run(drive(address))
        runs = []
        for _ in range(RUNS):
            before, start = cpu_s(process.pid), time.perf_counter()
            messages, tokens = asyncio.run(drive(address))
            runs.append((messages, tokens, cpu_s(process.pid) - before, time.perf_counter() - start))
        return min(runs, key=lambda run: run[2] / run[0])
    finally:
        process.terminate()
        process.wait()
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


def main() -> None:
    """Run both and print the table."""
    table = Table(title=f"front end, {STREAMS} streams of {TOKENS} tokens")
    for heading in ("engine", "messages", "tokens a message", "us CPU a message", "us CPU a token", "messages/s"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as directory:
        for name, step_ms in (("20 ms a step", 20.0), ("flat out", 0.0)):
            messages, tokens, cpu, wall = measure(step_ms, directory)
            table.add_row(
                name,
                f"{messages}",
                f"{tokens / messages:.2f}",
                f"{cpu / messages * 1e6:.1f}",
                f"{cpu / tokens * 1e6:.1f}",
                f"{messages / wall:.0f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
