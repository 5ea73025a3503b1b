"""What befalls the server in a soak, and when it is over."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import grpc

from tests.faults.leaks import processes
from tests.service.conftest import RunningServer
from tests.service.test_lifecycle import API, SERVING, health

WORKERS = 2
PAUSE_S = 1.0
"""Much less than server.engine_timeout_s: nobody may notice more than a delay."""
RECOVERY_S = 90.0
CONNECTIONS = 6
"""That all must be served before a fault is over: they are spread among the front ends."""

Inject = Callable[[RunningServer, random.Random], None]


@dataclass
class Fault:
    """One that was injected."""

    name: str
    lossy: bool
    """Whether requests may be lost by it."""
    begin: float
    end: float = inf
    """`time.monotonic()` readings."""

    def excuses(self, begin: float, end: float) -> bool:
        """Whether a request of that time may have been lost by it."""
        return self.lossy and begin <= self.end and end >= self.begin


def victim(server: RunningServer, role: str, chance: random.Random) -> int:
    return chance.choice([pid for pid, its_role in processes(server).items() if its_role == role])


def sending(role: str, number: signal.Signals) -> Inject:
    return lambda server, chance: os.kill(victim(server, role, chance), number)


def pausing(role: str) -> Inject:
    def inject(server: RunningServer, chance: random.Random) -> None:
        pid = victim(server, role, chance)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)

    return inject


SHORT: dict[str, tuple[Inject, bool]] = {
    "engine killed": (sending("engine", signal.SIGKILL), True),
    "engine paused": (pausing("engine"), False),
    "worker killed": (sending("worker", signal.SIGKILL), True),
    "worker paused": (pausing("worker"), False),
}
"""By name: how it is injected, and whether requests may be lost by it."""
ALL = SHORT | {
    "engine hung": (sending("engine", signal.SIGSTOP), True),
    "worker hung": (sending("worker", signal.SIGSTOP), True),
}


def recovered(server: RunningServer, before: set[int], lost: int) -> bool:
    """Whether all processes are there, `lost` of them new ones, and all of them serve."""
    now = {pid for pid, role in processes(server).items() if role in ("engine", "worker")}
    if len(now) != 1 + WORKERS or len(now - before) < lost:
        return False
    try:
        return all(health(server, API) == SERVING for _ in range(CONNECTIONS))
    except grpc.RpcError:
        return False


def befall(server: RunningServer, name: str, chance: random.Random, faults: list[Fault]) -> None:
    """Inject a fault, note it in `faults`, and wait until it is over. Raises AssertionError if that takes too long."""
    inject, lossy = ALL[name]
    before = {pid for pid, role in processes(server).items() if role in ("engine", "worker")}
    fault = Fault(name, lossy, time.monotonic())
    faults.append(fault)
    inject(server, chance)
    while not recovered(server, before, int(lossy)):
        assert time.monotonic() < fault.begin + RECOVERY_S, f"{name}: the server has not recovered"
        time.sleep(0.1)
    fault.end = time.monotonic()
