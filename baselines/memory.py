"""How much GPU memory a server takes, as nvidia-smi tells it."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType

_POLL_S = 5.0
"""Seldom, since a query may delay the GPU's work."""


class PeakMemory:
    """The most that the processes of a tree held while the block ran, in GiB; None without nvidia-smi.

    Where their ids are not known, or not those that nvidia-smi sees (as in a container), the memory used on all GPUs.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.peak_gib: float | None = None

    def __enter__(self) -> PeakMemory:
        if shutil.which("nvidia-smi"):
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            used_mib = _used_mib(self._pid)
            if used_mib:
                self.peak_gib = max(self.peak_gib or 0.0, used_mib / 1024)


def _used_mib(pid: int | None) -> float:
    if pid is not None:
        tree = process_tree(pid)
        apps = [line.split(",") for line in _query("--query-compute-apps=pid,used_memory")]
        if used := sum(_number(memory) for app, memory in apps if app.strip().isdigit() and int(app) in tree):
            return used
    return sum(_number(line) for line in _query("--query-gpu=memory.used"))


def _query(what: str) -> list[str]:
    try:
        ran = subprocess.run(["nvidia-smi", what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return ran.stdout.splitlines() if ran.returncode == 0 else []


def _number(text: str) -> float:
    """0 for what nvidia-smi does not know, such as [N/A]."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def process_tree(root: int) -> set[int]:
    """The process and its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
    tree = {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree
