"""The rows of a result: one for each measurement of a cell, as JSON.

`block` and `repeat` tell a cell's measurements from each other; where they are missing, as in older results, it was measured once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baselines.cells import Row, Shape
from baselines.schedule import Step

MOST_LAG_MS = 20.0
"""A load generator that is later than this at p99 measures itself."""
_LEAST_DISTINCT = 0.9
_MOST_CACHED = 0.05
_LENGTHS = ("tokens received, but", "token ids received, but")
"""What the load generator says of an answer of another length than was asked for, or than the server says."""


def make_row(
    step: Step,
    shape: Shape,
    summary: dict[str, Any],
    *,
    facts: dict[str, Any],
    expected_distinct: float | None,
    peak_memory_gib: float | None,
) -> Row:
    """The row of a measurement, from the load generator's summary.

    `facts` is what the server and its probe tell, `expected_distinct` experts a layer.
    """
    row: Row = {
        **_head(step, shape),
        "requests": summary["requests"]["completed"],
        "errors": summary["requests"]["failed"],
        "ttft_ms": _percentiles(summary["ttft_ms"], "p50", "p99"),
        "tpot_ms": _percentiles(summary["tpot_ms"], "p50"),
        "itl_ms": _percentiles(summary["itl_ms"], "p99"),
        "output_tokens_per_s": summary["tokens"]["output_per_s"],
        "receive_lag_ms": _percentiles(summary["receive_lag_ms"], "p99"),
        "distinct_experts": None,
        "peak_memory_gib": peak_memory_gib,
        "start_s": None,
        "client_cpu": summary["client_cpu"],
        **facts,
    }
    if reasons := _objections(row, summary, expected_distinct):
        row["invalid"] = reasons
    return row


def failed_row(step: Step, shape: Shape, failure: str) -> Row:
    """The row of a measurement that came to nothing."""
    return {
        **_head(step, shape),
        "requests": 0,
        "errors": 0,
        "ttft_ms": {"p50": None, "p99": None},
        "tpot_ms": {"p50": None},
        "itl_ms": {"p99": None},
        "output_tokens_per_s": None,
        "receive_lag_ms": {"p99": None},
        "distinct_experts": None,
        "peak_memory_gib": None,
        "start_s": None,
        "failure": failure,
    }


def refusal(shape: Shape, summary: dict[str, Any]) -> str:
    """Why the figures are no figures: answers of other lengths are other work. "" where they are."""
    for errors in summary["errors"].values():
        if any(words in errors["example"] for words in _LENGTHS):
            return f"answers are not of the {shape.output_tokens} tokens asked for: {errors['count']} requests, such as {errors['example']}"
    return ""


def key(row: Row) -> tuple[str, str, int, int, int]:
    """What a row is the row of."""
    return row["target"], json.dumps(row["workload"], sort_keys=True), row["concurrency"], row.get("block", 1), row.get("repeat", 0)


def keys_of(step: Step) -> set[tuple[str, str, int, int, int]]:
    """Those of all rows of a measurement."""
    return {key(_head(step, shape)) for shape in step.cell.shapes}


def read_rows(path: Path) -> list[Row]:
    """Raises ValueError for a file that is not a result; none where there is no file."""
    try:
        rows = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path}: not a list of cells")
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{path}: a cell is no object: {row!r}")
        if not (isinstance(reasons := row.get("invalid", []), list) and all(isinstance(reason, str) for reason in reasons)):
            raise ValueError(f"{path}: invalid: not a list of reasons: {reasons!r}")
    return rows


def write_rows(path: Path, rows: list[Row]) -> None:
    """All at once: a run that is killed leaves the file as it was, or as it shall be."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows, indent=2) + "\n")
    unfinished.replace(path)


def _head(step: Step, shape: Shape) -> Row:
    return {
        "target": step.target,
        "workload": step.cell.workload(shape),
        "concurrency": step.cell.concurrency,
        "schedule": step.schedule,
        "block": step.block,
        "repeat": step.repeat,
    }


def _percentiles(latency: dict[str, Any], *names: str) -> dict[str, float | None]:
    return {name: latency[name] for name in names}


def _objections(row: Row, summary: dict[str, Any], expected_distinct: float | None) -> list[str]:
    """Why the row's figures must not be compared."""
    reasons = [f"{errors['count']} requests failed ({kind}), such as {errors['example']}" for kind, errors in summary["errors"].items()]
    if not row["requests"]:
        reasons.append("no request was completed")
    elif row["ttft_ms"]["p50"] is None:  # The window is too short, or the server stood still, to compile, say.
        reasons.append("no request began and ended in the window")
    lag_ms = row["receive_lag_ms"]["p99"]
    if lag_ms is not None and lag_ms > MOST_LAG_MS:
        reasons.append(f"the load generator was {lag_ms:.0f} ms late at p99, more than {MOST_LAG_MS:.0f}")
    tokens = summary["tokens"]
    if tokens["cached"] > _MOST_CACHED * tokens["input"]:
        reasons.append(f"{tokens['cached']} of {tokens['input']} input tokens came from the prefix cache: change loadtest.seed")
    distinct = row["distinct_experts"]
    if distinct is not None and expected_distinct and distinct < _LEAST_DISTINCT * expected_distinct:
        reasons.append(f"{distinct:.1f} distinct experts a layer, but uniform routing has {expected_distinct:.1f}")
    return reasons
