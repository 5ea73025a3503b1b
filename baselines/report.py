"""The result of a comparison: a list of cells as JSON, and as a table with ratios.

python -m baselines.report OUT/result.json             # to the terminal
python -m baselines.report OUT/result.json --markdown
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baselines.cells import Cell, Row, Shape

MOST_LAG_MS = 20.0
"""A load generator that is later than this at p99 measures itself."""
_LEAST_DISTINCT = 0.9
_MOST_CACHED = 0.05
_FIGURES: list[tuple[str, Callable[[Row], float | None]]] = [
    ("TTFT p50 ms", lambda row: row["ttft_ms"]["p50"]),
    ("TTFT p99 ms", lambda row: row["ttft_ms"]["p99"]),
    ("TPOT p50 ms", lambda row: row["tpot_ms"]["p50"]),
    ("ITL p99 ms", lambda row: row["itl_ms"]["p99"]),
    ("tokens/s", lambda row: row["output_tokens_per_s"]),
    ("memory GiB", lambda row: row["peak_memory_gib"]),
    ("start s", lambda row: row["start_s"]),
]


def make_row(
    target: str,
    cell: Cell,
    shape: Shape,
    summary: dict[str, Any],
    *,
    extra: dict[str, Any],
    expected_distinct: float | None,
    peak_memory_gib: float | None,
    start_s: float | None,
) -> Row:
    """The cell's row, from the load generator's summary; `extra` is what the target itself tells, `expected_distinct` experts a layer."""
    row: Row = {
        "target": target,
        "workload": cell.workload(shape),
        "concurrency": cell.concurrency,
        "requests": summary["requests"]["completed"],
        "errors": summary["requests"]["failed"],
        "ttft_ms": _percentiles(summary["ttft_ms"], "p50", "p99"),
        "tpot_ms": _percentiles(summary["tpot_ms"], "p50"),
        "itl_ms": _percentiles(summary["itl_ms"], "p99"),
        "output_tokens_per_s": summary["tokens"]["output_per_s"],
        "receive_lag_ms": _percentiles(summary["receive_lag_ms"], "p99"),
        "distinct_experts": None,
        "peak_memory_gib": peak_memory_gib,
        "start_s": start_s,
        "client_cpu": summary["client_cpu"],
        **extra,
    }
    if reasons := _objections(row, summary, expected_distinct):
        row["invalid"] = reasons
    return row


def failed_row(target: str, cell: Cell, shape: Shape, failure: str) -> Row:
    """The row of a cell that could not be measured."""
    return {
        "target": target,
        "workload": cell.workload(shape),
        "concurrency": cell.concurrency,
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


def key(row: Row) -> tuple[str, str, int]:
    """What a row is the row of."""
    return row["target"], json.dumps(row["workload"], sort_keys=True), row["concurrency"]


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
    return rows


def write_rows(path: Path, rows: list[Row]) -> None:
    """All at once: a run that is killed leaves the file as it was, or as it shall be."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows, indent=2) + "\n")
    unfinished.replace(path)


def _percentiles(latency: dict[str, Any], *names: str) -> dict[str, float | None]:
    return {name: latency[name] for name in names}


def _objections(row: Row, summary: dict[str, Any], expected_distinct: float | None) -> list[str]:
    """Why the row's figures must not be compared."""
    reasons = [f"{errors['count']} requests failed ({kind}), such as {errors['example']}" for kind, errors in summary["errors"].items()]
    if not row["requests"]:
        reasons.append("no request was completed")
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


def table_lines(rows: list[Row], targets: list[str]) -> list[list[str]]:
    """Header, then for each cell a line a target and the ratio of the first target to each other."""
    lines = [["in/out", "users", "target", *(title for title, _ in _FIGURES), "note"]]
    cells: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(key(row)[1:], {})[row["target"]] = row
    for by_target in cells.values():
        for name in (present := [name for name in targets if name in by_target]):
            lines.append(_figures_line(by_target[name]))
        for other in present[1:]:
            if present[0] == targets[0]:
                lines.append(_ratio_line(by_target[present[0]], by_target[other]))
    return lines


def _figures_line(row: Row) -> list[str]:
    note = row.get("failure") or "; ".join(row.get("invalid", []))
    figures = [_shown(figure(row)) for _, figure in _FIGURES]
    return [_workload(row["workload"]), str(row["concurrency"]), row["target"], *figures, f"INVALID: {note}" if note else ""]


def _ratio_line(row: Row, other: Row) -> list[str]:
    pairs = [(figure(row), figure(other)) for _, figure in _FIGURES]
    ratios = ["" if a is None or not b else f"x {a / b:.2f}" for a, b in pairs]
    return ["", "", f"{row['target']} / {other['target']}", *ratios, ""]


def _workload(workload: dict[str, Any]) -> str:
    text = f"{workload['input_tokens']}/{workload['output_tokens']}"
    if "temperature" in workload:
        text += f", T {workload['temperature']:g}, top-p {workload['top_p']:g}"
    if beside := workload.get("beside"):
        text += f" beside {beside['input_tokens']}/{beside['output_tokens']}"
    return text


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def print_table(rows: list[Row], targets: list[str], markdown: bool = False) -> None:
    """With one target alone there are no ratios."""
    header, *lines = table_lines(rows, targets)
    if markdown:
        for line in (header, ["---"] * len(header), *lines):
            print(f"| {' | '.join(line)} |")
        return
    table = Table(*header)
    for column in table.columns[3:-1]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line, style="red" if line[-1] else "bold" if " / " in line[2] else None, end_section=not line[0])
    console = Console()
    # A pipe has no width of its own, and a narrow table would be cut.
    Console(width=max(console.width, 160), highlight=False, markup=False).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baselines.report", description="Show the result of a comparison.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--targets", help="in this order, the first against each other; by default as in the file")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args()
    try:
        rows = read_rows(args.result)
    except ValueError as error:
        sys.exit(f"baselines.report: {error}")
    targets = args.targets.split(",") if args.targets else list(dict.fromkeys(row["target"] for row in rows))
    print_table(rows, targets, args.markdown)


if __name__ == "__main__":
    main()
