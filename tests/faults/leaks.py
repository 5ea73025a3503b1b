"""Counts what a running server holds, and asserts that it holds no more after a fault than before.

leaks = Leaks(server)            # at rest, once each kind of call has been made
...                              # the fault
leaks.assert_back()              # polls until all counts are back
server.stop()
leaks.assert_gone()              # no process is left, nor a directory of its sockets
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from pathlib import Path

import grpc

from inference.v1 import info_pb2
from tests.service.conftest import RunningServer
from tests.service.test_prometheus import get, samples

ROLES = {
    "inference_service.cli": "server",
    "tests.faults.serve_with": "server",
    "inference_service.rpc.worker": "worker",
    "inference_service.engine.process": "engine",
    "tests.faults.faulty_engine": "engine",
    "tests.faults.slow_engine": "engine",
    "tests.soak.engine": "engine",
}
"""Modules that processes run, and what these are then."""

GAUGES = {"inference_streams": "streams", "inference_tasks": "tasks", "inference_telemetry_open_spans": "spans"}
"""Metrics that must go back, and what they count."""

POOL_THREADS = 8
"""By which the pools of gRPC and asyncio, which grow with the load up to a bound, may differ."""


class Leaks:
    """What a server held when this was made, by the role of its processes: processes, fds, sockets, threads; requests and pages; and, where
    it has a port for metrics, streams, asyncio tasks and open spans."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._pids: set[int] = set()
        self.before = self._settled()

    def counts(self) -> Counter[str]:
        """What is held now, such as {"fds of server": 31, "pages": 0}. The channel that asks is not counted: it is open each time."""
        counts: Counter[str] = Counter()
        with self._server.stub() as stub:
            load = stub.GetLoad(info_pb2.GetLoadRequest(), timeout=30)
            for pid, role in processes(self._server).items():
                self._pids.add(pid)
                counts += _held_by(pid, role)
        return counts + Counter(pages=load.pages_used, requests=load.running + load.waiting) + gauges(self._server)

    def assert_back(self, timeout_s: float = 30.0) -> None:
        """All counts are back to what they were, or below, within the time."""
        end = time.monotonic() + timeout_s
        while more := self._more():
            assert time.monotonic() < end, f"still held: {more}"
            time.sleep(0.1)

    def assert_gone(self, timeout_s: float = 30.0) -> None:
        """The server has ended, and left neither a process nor a directory."""
        end = time.monotonic() + timeout_s
        while left := [f"process {pid}" for pid in processes(self._server)] + self._directories():
            assert time.monotonic() < end, f"left: {left}"
            time.sleep(0.05)

    def _more(self) -> dict[str, str]:
        """What there is more of than before."""
        try:
            now = self.counts()
        except grpc.RpcError as error:
            return {"an answer": str(error)}
        return {
            what: f"{count}, before {self.before[what]}"
            for what, count in now.items()
            if count > self.before[what] + (POOL_THREADS if what.startswith("threads") else 0)
        }

    def _settled(self) -> Counter[str]:
        """Counts once two in a row are equal: what start-up or a last client leaves ends a moment later."""
        counts = self.counts()
        while True:
            time.sleep(0.3)
            counts, before = self.counts(), counts
            if counts == before:
                return counts

    def _directories(self) -> list[str]:
        owners = {self._server.process.pid, *self._pids}
        return [str(path) for pid in owners for path in Path(tempfile.gettempdir()).glob(f"inference-service-{pid}-*")]


def processes(server: RunningServer) -> dict[int, str]:
    """All living processes of a server and their roles, also those whose parents are gone: they share a mark in their environment."""
    mark = f"TEST_SERVER={server.traces.parent}".encode()
    found = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            if mark in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = _role(directory)
        except OSError:  # it has just ended, or is somebody else's
            continue
    return {pid: role for pid, role in found.items() if role}


def gauges(server: RunningServer) -> Counter[str]:
    """What the metrics tell of what must go back, over all front ends that live. Nothing without `telemetry.metrics_port`."""
    counts: Counter[str] = Counter()
    for port in re.findall(r"metrics on port (\d+)", (server.traces.parent / "server.log").read_text(errors="replace")):
        try:
            told = samples(get(f"http://127.0.0.1:{port}/metrics"))
        except OSError:  # of a front end that has ended
            continue
        counts += Counter({what: int(told[name]) for name, what in GAUGES.items()})
    return counts


def _role(directory: Path) -> str:
    """Of what is not listed, its command; of a zombie, which holds nothing, an empty string."""
    arguments = (directory / "cmdline").read_text().split("\0")
    return next((ROLES[argument] for argument in arguments if argument in ROLES), " ".join(arguments).strip())


def pid_of(server: RunningServer, role: str) -> int:
    """The one process of that role."""
    (pid,) = [pid for pid, its_role in processes(server).items() if its_role == role]
    return pid


def _held_by(pid: int, role: str) -> Counter[str]:
    try:
        targets = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except OSError:
        return Counter()
    sockets = sum(target.startswith("socket:") for target in targets)
    return Counter({f"{role} processes": 1, f"fds of {role}": len(targets), f"sockets of {role}": sockets, f"threads of {role}": threads})
