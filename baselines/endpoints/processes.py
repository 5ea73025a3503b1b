"""Processes of a server, and how to be rid of them. They are told from each other by Linux's /proc."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from baselines.memory import process_tree, used_gpu_gib

STOP_S = 60.0
"""Then a server that was asked to end is killed."""
_ORPHANS_S = 5.0
"""How long its other processes may outlive its first."""
_LET_GO_S = 30.0
"""How long a port and a GPU's memory may stay taken when their processes are gone."""
_SPARE_GIB = 1.0
"""What the GPU's memory may differ by without being a server's."""
_POLL_S = 0.25


def began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, which tells it from a later one of the same id; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def end(leader: int) -> list[int]:
    """End a session's leader, its group and its descendants, also those that have left the group. What is still there afterwards."""
    family = {pid: began(pid) for pid in process_tree(leader)}

    def left() -> list[int]:
        with suppress(ChildProcessError):  # where another run started it
            os.waitpid(leader, os.WNOHANG)
        # Some may have been started since.
        family.update({pid: began(pid) for pid in _group(leader) if pid not in family})
        return [pid for pid, start in family.items() if start and began(pid) == start]

    _signal([leader], signal.SIGTERM)
    _waits(lambda: leader not in left(), STOP_S)
    if not _waits(lambda: not left(), _ORPHANS_S):
        _signal(left(), signal.SIGKILL)
        _waits(lambda: not left(), STOP_S)
    return left()


def left_over(host: str, port: int, gpu_gib: float | None) -> list[str]:
    """What a server that is gone still holds; `gpu_gib` is what was used of all GPUs before it began."""
    found = []
    if not _waits(lambda: not _is_taken(host, port), _LET_GO_S):
        found.append(f"port {port} is still taken")
    if gpu_gib is not None and not _waits(lambda: (used_gpu_gib() or 0.0) <= gpu_gib + _SPARE_GIB, _LET_GO_S):
        found.append(f"the GPUs use {used_gpu_gib():.1f} GiB, {gpu_gib:.1f} before it began")
    return found


def _group(leader: int) -> Iterable[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[2]) == leader:
            yield int(stat.parent.name)


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((host, port)) == 0


def _waits(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
