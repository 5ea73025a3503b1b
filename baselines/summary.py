"""What a result says: for each cell each target's figures over its repeats, and the ratios of the first target to the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baselines.cells import Row
from baselines.estimates import Estimate, mean_of, paired_ratio, ratio
from baselines.schedule import BLOCKS, INTERLEAVED


@dataclass(frozen=True)
class Figure:
    """One figure of a row."""

    title: str
    of: Callable[[Row], float | None]
    per_start: bool = False
    """One sample a block, since it belongs to the server's start."""


FIGURES = (
    Figure("TTFT p50 ms", lambda row: row["ttft_ms"]["p50"]),
    Figure("TTFT p99 ms", lambda row: row["ttft_ms"]["p99"]),
    Figure("TPOT p50 ms", lambda row: row["tpot_ms"]["p50"]),
    Figure("ITL p99 ms", lambda row: row["itl_ms"]["p99"]),
    Figure("tokens/s", lambda row: row["output_tokens_per_s"]),
    Figure("memory GiB", lambda row: row["peak_memory_gib"], per_start=True),
    Figure("start s", lambda row: row["start_s"], per_start=True),
)
Estimates = dict[str, Estimate]
"""By the figures' titles; those that were measured."""


@dataclass(frozen=True)
class Cell:
    """All that was measured of one workload at one concurrency."""

    workload: dict[str, Any]
    concurrency: int
    figures: dict[str, Estimates]
    """By target: of its valid rows, or where there are none, of those that are invalid."""
    ratios: dict[str, Estimates]
    """Of valid rows, by "A / B". Beside those to other targets, "A again / A" of the first target's second block to its first."""
    objections: dict[str, list[str]]
    """By target: why its figures must not be compared."""

    @property
    def name(self) -> str:
        text = f"{self.workload['input_tokens']}/{self.workload['output_tokens']}"
        if "temperature" in self.workload:
            text += f", T {self.workload['temperature']:g}, top-p {self.workload['top_p']:g}"
        if beside := self.workload.get("beside"):
            text += f" beside {beside['input_tokens']}/{beside['output_tokens']}"
        return text


@dataclass(frozen=True)
class Summary:
    """A whole result."""

    targets: list[str]
    how: str
    """In which order it was measured."""
    notes: dict[str, list[str]]
    """By target: what a reader of its figures must know."""
    cells: list[Cell]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summarize(rows: Sequence[Row], targets: Sequence[str]) -> Summary:
    """The first of `targets` is compared with each other."""
    by_cell: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        by_cell.setdefault((json.dumps(row["workload"], sort_keys=True), row["concurrency"]), {}).setdefault(row["target"], []).append(row)
    wanted = ({name: found[name] for name in targets if name in found} for found in by_cell.values())
    return Summary(list(targets), _how(rows), _notes(rows, targets), [_cell(found, targets[0]) for found in wanted if found])


def _cell(by_target: dict[str, list[Row]], first: str) -> Cell:
    some = next(iter(by_target.values()))[0]
    objections = {name: problems for name, rows in by_target.items() if (problems := _problems(rows))}
    valid = {name: [row for row in rows if "failure" not in row and not row.get("invalid")] for name, rows in by_target.items()}
    whole = {name: rows for name, rows in valid.items() if rows and not any("failure" in row for row in by_target[name])}
    ratios = {}
    if first in whole:
        ratios = {f"{first} / {other}": _ratios(whole[first], rows) for other, rows in whole.items() if other != first}
        by_block = [[row for row in whole[first] if row.get("block", 1) == block] for block in (1, 2)]
        if all(by_block):
            ratios[f"{first} again / {first}"] = _ratios(by_block[1], by_block[0])
    shown = {name: valid[name] or rows for name, rows in by_target.items()}
    figures = {
        name: {figure.title: mean_of(found) for figure in FIGURES if (found := _samples(rows, figure))} for name, rows in shown.items()
    }
    return Cell(some["workload"], some["concurrency"], figures, ratios, objections)


def _samples(rows: Sequence[Row], figure: Figure) -> list[float]:
    if not figure.per_start:
        return [value for row in rows if (value := figure.of(row)) is not None]
    by_block: dict[int, float] = {}
    for row in rows:
        if (value := figure.of(row)) is not None:
            by_block[row.get("block", 1)] = max(value, by_block.get(row.get("block", 1), value))
    return list(by_block.values())


def _ratios(rows: Sequence[Row], others: Sequence[Row]) -> Estimates:
    side_by_side = all(row.get("schedule") == INTERLEAVED for row in [*rows, *others])
    found: Estimates = {}
    for figure in FIGURES:
        if side_by_side and not figure.per_start:
            beside = {row["repeat"]: figure.of(row) for row in others}
            if pairs := [(a, b) for row in rows if (a := figure.of(row)) and (b := beside.get(row["repeat"]))]:
                found[figure.title] = paired_ratio(pairs)
        elif (mine := _samples(rows, figure)) and (theirs := _samples(others, figure)) and min(mine + theirs) > 0:
            found[figure.title] = ratio(mine, theirs)
    return found


def _problems(rows: Sequence[Row]) -> list[str]:
    """Those of several repeats once, with which repeats they are of."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for problem in [row["failure"]] if "failure" in row else row.get("invalid", []):
            found.setdefault(problem, []).append(f"{row.get('block', 1)}.{row.get('repeat', 0) + 1}")
    return [problem if len(rows) == 1 or len(which) == len(rows) else f"{', '.join(which)}: {problem}" for problem, which in found.items()]


def _how(rows: Sequence[Row]) -> str:
    schedules = {row.get("schedule", BLOCKS) for row in rows}
    if schedules == {INTERLEAVED}:
        return (
            "Interleaved: all servers were up at once, and each cell went from one to the next, backwards in every other repeat. "
            "Ratios are of measurements side by side."
        )
    order = " ".join(dict.fromkeys(f"{row['target']}{'' if row.get('block', 1) == 1 else ' (again)'}," for row in rows)).rstrip(",")
    text = f"In blocks on one device, one server at a time: {order}. A block's repeats share one start of its server."
    return text if len(schedules) == 1 else f"{text} Some cells were interleaved instead."


def _notes(rows: Sequence[Row], targets: Sequence[str]) -> dict[str, list[str]]:
    notes: dict[str, dict[str, None]] = {name: {} for name in targets}
    for row in rows:
        if row["target"] in notes:
            version = [f"version {row['version']}"] if row.get("version") else []
            notes[row["target"]].update(dict.fromkeys([*version, *row.get("notes", [])]))
    return {name: list(found) for name, found in notes.items() if found}
