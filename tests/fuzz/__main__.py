"""Random input by the number: `python -m tests.fuzz --inputs 100000`.

A server with the echo engine gets requests with random fields, random bytes as requests, and connections that break HTTP/2; configuration
files are loaded that may hold anything. Every call must end with a status that is no fault of the server's, every file load or be refused
with the key. In the end the server must serve, and hold no more than it did after its first inputs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.strategies import SearchStrategy

from tests.faults.leaks import Leaks, processes
from tests.fuzz import configs, frames, messages
from tests.service.conftest import RunningServer, run_server

CHUNK = 500
"""Inputs made by one run of hypothesis, which remembers all of them."""
AT_ONCE = 8
"""Inputs that are examined at the same time."""
MOST_GROWTH_MIB = 128.0
"""Of all processes: allocators keep what many connections at once and large grammars needed. 100,000 inputs made it about 60 MiB more,
35 of which came with the first 7,000 connections and 3 with the next 3,000."""
PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
POOLED_THREADS = 16
"""gRPC and asyncio have pools, which grow with what is done at once up to a limit, and keep their threads."""
SETTINGS = ("model.load_format=echo", "server.admin_port=0", "telemetry.traces=false")


@dataclass
class Part:
    """One kind of input."""

    name: str
    share: float
    inputs: SearchStrategy[Any]
    check: Callable[[Any], str]
    """Gives the outcome; raises AssertionError for one that must not be."""
    each: int = 1
    """Inputs that are drawn as one, in a list."""
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def run(self, count: int, seed: int) -> None:
        begin = time.monotonic()
        pending: list[tuple[Any, Future[str]]] = []

        @seeded(seed)
        @settings(
            max_examples=-(-count // self.each),
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(self.inputs)
        def examine(given: Any) -> None:
            for one in given if self.each > 1 else [given]:
                pending.append((one, pool.submit(self.check, one)))

        with ThreadPoolExecutor(AT_ONCE) as pool:
            examine()
        for input_, future in pending:
            try:
                self.outcomes[future.result()] += 1
            except AssertionError as error:
                raise AssertionError(f"{self.name}: {error}; the input was {input_!r}") from None
        self.seconds += time.monotonic() - begin


def make_parts(server: RunningServer, channel: grpc.Channel) -> list[Part]:
    host, _, port = server.address.rpartition(":")
    return [
        Part("fields", 0.15, messages.calls(), lambda call: messages.call(channel, *call)),
        Part("raw bytes", 0.55, messages.raw_calls(), lambda call: messages.call(channel, *call), messages.SPOILT),
        Part("connections", 0.1, frames.connections(), lambda each: f"{each[0]}: {frames.attack((host, int(port)), *each[1:])}"),
        Part("configuration keys", 0.1, configs.mutations, configs.check_mutation),
        Part("configuration text", 0.05, configs.texts, configs.check_text),
        Part("overrides", 0.05, configs.overrides, configs.check_override),
    ]


def fuzz(inputs: int, seed: int, report: Callable[[str], None] = print) -> None:
    """Raises what a check raises, and AssertionError where the server has suffered."""
    with tempfile.TemporaryDirectory() as directory, run_server(Path(directory), *SETTINGS) as server:
        with grpc.insecure_channel(server.address) as channel:
            parts = make_parts(server, channel)
            for part in parts:
                part.run(min(100, max(1, inputs // 50)), seed)
            assert messages.call(channel, "Generate", messages.STRUCTURED) == "OK", "the grammars' process begins with its first one"
        leaks, before_mib, engine = Leaks(server), memory_mib(server), server.engine_pid
        leaks.before.update({what: POOLED_THREADS for what in leaks.before if what.startswith("threads of")})
        with grpc.insecure_channel(server.address) as channel:
            for old, part in zip(parts, make_parts(server, channel), strict=True):
                part.outcomes = old.outcomes
                for done in range(0, int(inputs * part.share), CHUNK):
                    seed += 1
                    part.run(min(CHUNK, int(inputs * part.share) - done), seed)
                    report(f"{part.name}: {part.outcomes.total()} in {part.seconds:.0f} s, server {memory_mib(server):.0f} MiB")
                old.seconds += part.seconds
        grown_mib = memory_mib(server) - before_mib
        for part in parts:
            report(f"{part.name}: {part.outcomes.total()} inputs in {part.seconds:.0f} s: {dict(sorted(part.outcomes.items()))}")
        report(f"memory of the server's processes: {before_mib:.0f} MiB, then {grown_mib:+.0f} MiB")
        leaks.assert_back()
        assert server.engine_pid == engine, "the engine was started again"
        with grpc.insecure_channel(server.address) as channel:
            assert messages.call(channel, "Generate", frames.GENERATE) == "OK"
        log = (Path(directory) / "server.log").read_text(errors="replace")
        assert "Traceback" not in log, log[-4000:]
        assert grown_mib < MOST_GROWTH_MIB, f"the server's processes grew by {grown_mib:.0f} MiB"
        report("nothing is held, and it serves")


def memory_mib(server: RunningServer) -> float:
    """What the server's processes keep in memory, shared pages counted in each."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes(server)) * PAGE_SIZE / 2**20


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fuzz(arguments.inputs, arguments.seed, lambda line: print(line, flush=True))
