"""How much memory a server takes: on a GPU as nvidia-smi tells it, else resident memory as Linux does."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_POLL_S = 5.0
"""Seldom, since a query may delay the GPU's work."""
_GIB = 2**30


class PeakMemory:
    """The most that the processes of a tree held while the block ran, in GiB; None where there is no telling.

    Where there is a GPU that is its memory; if the processes are not known, or not those that nvidia-smi sees (as in a container), that
    used on the GPUs that are visible.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self.peak_gib: float | None = None

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def _poll(self) -> None:
        while not self._stop.wait(_POLL_S):
            self._look()

    def _look(self) -> None:
        if used_gib := _used_gib(self._pid):
            self.peak_gib = max(self.peak_gib or 0.0, used_gib)


def used_gpu_gib() -> float | None:
    """Used of the GPUs that CUDA_VISIBLE_DEVICES names by number or UUID, of all where it names none; None without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return None
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = [line.split(", ") for line in _query("--query-gpu=index,uuid,memory.used")]
    visible = [gpu for gpu in gpus if any(gpu[0] == name or gpu[1].startswith(name) for name in names)]
    return sum(_number(used) for _, _, used in visible or gpus) / 1024


def available_gib() -> float | None:
    """What programs may take of this machine's memory; None where it is not Linux."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 / _GIB for line in lines if line.startswith("MemAvailable:")), None)


def _used_gib(pid: int | None) -> float | None:
    tree = process_tree(pid) if pid else set[int]()
    if not shutil.which("nvidia-smi"):
        return sum(_resident_gib(one) for one in tree)
    apps = [line.split(",") for line in _query("--query-compute-apps=pid,used_memory")]
    if used := sum(_number(memory) for app, memory in apps if app.strip().isdigit() and int(app) in tree):
        return used / 1024
    return used_gpu_gib()


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


def _resident_gib(pid: int) -> float:
    with suppress(OSError, IndexError, ValueError):  # it ended meanwhile
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
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
