"""Results, one JSON line each, written as they come; a later run resumes where an earlier one ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Key = tuple[str, str, str]
"""Operator, backend, case."""


class Machine(msgspec.Struct, frozen=True, tag="machine"):
    """The first line: where and of which model the results are."""

    device: str
    architecture: str
    model: str
    dtype: str
    versions: dict[str, str]
    peers: dict[str, str] = {}
    """Versions of what is measured where it is installed, and which may come later."""
    bandwidth: float | None = None
    """TB/s that are reachable; None: nothing is known of the device, and no share of a limit can be stated."""
    peak_bandwidth: float | None = None
    tflops: dict[str, float] = {}


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """One backend at one case."""

    operator: str
    backend: str
    case: str = ""
    """Empty: all of them."""
    kind: str = ""
    sizes: dict[str, int] = {}
    status: Literal["measured", "unsupported", "wrong", "failed", "skipped"]
    """Of these, measured and wrong are kept by --resume."""
    reason: str = ""
    """Why there is no time."""
    note: str = ""
    us: float | None = None
    timed: str = ""
    tflops: float | None = None
    tbs: float | None = None
    """TB/s of what cannot but be read and written."""
    share: float | None = None
    """Of the limit."""
    bound: str = ""
    """Which limit: memory or compute."""
    error: float | None = None
    tolerance: float | None = None
    first_use_s: float | None = None
    """Of its first call, which compiles or loads; of the first case alone."""

    @property
    def key(self) -> Key:
        return self.operator, self.backend, self.case

    @property
    def final(self) -> bool:
        return self.status in ("measured", "wrong")


Line = Machine | Result


def read(path: Path) -> tuple[Machine | None, list[Result]]:
    """The newest result of each key. A last line that was cut off is left out. Raises ValueError, which names the line, for another."""
    machine, results = None, dict[Key, Result]()
    lines = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        try:
            line = msgspec.json.decode(text, type=Line) if text.strip() else None
        except msgspec.DecodeError as error:
            if number == len(lines):
                continue
            raise ValueError(f"{path}, line {number}: {error}") from None
        if isinstance(line, Machine):
            machine = line
        elif line:
            results[line.key] = line
    return machine, list(results.values())


class Record:
    """The file that results go to, or none; what an earlier run left there is kept with `resume`."""

    def __init__(self, path: Path | None, resume: bool, machine: Machine) -> None:
        self.machine, self.path, self.results = machine, path, dict[Key, Result]()
        before = None
        if path and resume and path.exists():
            before, results = read(path)
            if before and msgspec.structs.replace(before, peers=machine.peers) != machine:
                raise ValueError(f"--resume: {path} was measured elsewhere: {before}, here is {machine}")
            self.results = {result.key: result for result in results if result.final}
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write([machine, *self.results.values()])

    def add(self, result: Result) -> None:
        self.results[result.key] = result
        if self.path:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")

    def _write(self, lines: Iterable[Line]) -> None:
        assert self.path
        draft = self.path.with_name(f"{self.path.name}.draft")
        draft.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        draft.replace(self.path)
