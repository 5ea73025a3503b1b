"""The report of a comparison, of its result: a table with ratios, JSON, and a page.

python -m baselines.report OUT/result.json                 # to the terminal
python -m baselines.report OUT/result.json --markdown
python -m baselines.report OUT/result.json --html report.html --json report.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baselines.cells import Row
from baselines.estimates import Estimate
from baselines.page import page
from baselines.rows import read_rows
from baselines.summary import FIGURES, Cell, Estimates, Summary, summarize

INTERVALS = "± and ranges: 95 % confidence over n repeats (Student's t); ratios are of geometric means."


def table_lines(summary: Summary) -> list[list[str]]:
    """Header, then for each cell a line a target and a line a ratio."""
    lines = [["in/out", "users", "target", "n", *(figure.title for figure in FIGURES), "note"]]
    for cell in summary.cells:
        lines += [_figures_line(cell, name, estimates) for name, estimates in cell.figures.items()]
        lines += [_ratio_line(name, estimates) for name, estimates in cell.ratios.items()]
    return lines


def _figures_line(cell: Cell, name: str, estimates: Estimates) -> list[str]:
    samples = max((estimate.samples for estimate in estimates.values()), default=0)
    objections = "; ".join(cell.objections.get(name, []))
    return [
        cell.name,
        str(cell.concurrency),
        name,
        str(samples),
        *(_mean(estimates.get(figure.title)) for figure in FIGURES),
        f"INVALID: {objections}" if objections else "",
    ]


def _ratio_line(name: str, estimates: Estimates) -> list[str]:
    samples = max((estimate.samples for estimate in estimates.values()), default=0)
    return ["", "", name, str(samples), *(_ratio(estimates.get(figure.title)) for figure in FIGURES), ""]


def _mean(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    return shown(estimate.value) + (f" ± {shown(estimate.high - estimate.value)}" if estimate.high is not None else "")


def _ratio(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"x {estimate.value:.2f}"
    return f"x {estimate.value:.2f} ({estimate.low:.2f}-{estimate.high:.2f})"


def shown(value: float) -> str:
    """Four digits or so."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def print_table(rows: Sequence[Row], targets: Sequence[str], markdown: bool = False) -> None:
    """With one target alone there are no ratios."""
    summary = summarize(rows, targets)
    header, *lines = table_lines(summary)
    remarks = [summary.how, INTERVALS, *(f"{name}: {'; '.join(notes)}." for name, notes in summary.notes.items())]
    if markdown:
        for line in (header, ["---"] * len(header), *lines):
            print(f"| {' | '.join(line)} |")
        print()
        for remark in remarks:
            print(f"- {remark}")
        return
    table = Table(*header)
    for column in table.columns[3:-1]:
        column.justify = "right"
    for line, following in zip(lines, [*lines[1:], header], strict=True):
        ends = following[:2] not in (line[:2], ["", ""])
        table.add_row(*line, style="red" if line[-1] else "bold" if not line[0] else None, end_section=ends)
    console = Console()
    # A pipe has no width of its own, and a narrow table would be cut.
    wide = Console(width=max(console.width, 180), highlight=False, markup=False)
    wide.print(table)
    for remark in remarks:
        wide.print(remark)


def write_report(rows: Sequence[Row], targets: Sequence[str], html: Path | None, as_json: Path | None) -> None:
    """The page, and what it says as JSON. Raises OSError."""
    summary = summarize(rows, targets)
    if html:
        html.write_text(page(summary, table_lines(summary), INTERVALS), encoding="utf-8")
    if as_json:
        as_json.write_text(json.dumps(summary.as_json(), indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m baselines.report", description="Show the result of a comparison.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--targets", help="in this order, the first against each other; by default as in the file")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write its means, ratios and intervals")
    args = parser.parse_args()
    try:
        rows = read_rows(args.result)
        targets = args.targets.split(",") if args.targets else list(dict.fromkeys(row["target"] for row in rows))
        if not targets:
            raise ValueError(f"{args.result}: no cells")
        write_report(rows, targets, args.html, args.json)
    except (ValueError, OSError) as error:
        sys.exit(f"baselines.report: {error}")
    print_table(rows, targets, args.markdown)


if __name__ == "__main__":
    main()
