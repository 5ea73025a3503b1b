"""The report of one run, or of several side by side, as one page that needs nothing else: no network, no script.

python -m loadgen._html ours.json vllm.json -o report.html
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from loadgen._charts import Runs, by_loads, groups
from loadgen._report import FIGURES, REPEATED, measures_of, name_of
from loadgen._result import Level, Result, read_result

_TEMPLATE = "report.html"


def write_report(result: Result, path: str) -> None:
    """The page of one run. Raises OSError."""
    Path(path).write_text(page([(result.target, result)]), encoding="utf-8")


def page(runs: Runs) -> str:
    """The page; every text in it is escaped."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"ms": _ms, "number": _number, "percent": _percent, "when": _when, "yaml": _settings}
    return environment.get_template(_TEMPLATE).render(
        runs=runs,
        rows=_rows(runs),
        groups=groups(runs),
        figures=FIGURES,
        repeated=REPEATED,
        measures_of=measures_of,
        name_of=name_of,
    )


def _rows(runs: Runs) -> list[tuple[str, Level]]:
    """(target, level): each load's targets below each other."""
    by_target = {name: by_loads(result.levels) for name, result in runs}
    loads = dict.fromkeys(load for found in by_target.values() for load in found)
    return [(name, level) for load in loads for name, found in by_target.items() for level in found.get(load, [])]


def _named(paths: Sequence[str]) -> Runs:
    """By their targets, and by their files where two are of one."""
    results = [(path, _read(path)) for path in paths]
    times = Counter(result.target for _, result in results)
    return [(result.target if times[result.target] == 1 else f"{result.target} ({path})", result) for path, result in results]


def _read(path: str) -> Result:
    try:
        return read_result(path)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    except msgspec.MsgspecError as error:
        sys.exit(f"{path}: no result of a load test: {error}")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _when(unix_ns: int) -> str:
    return f"{datetime.fromtimestamp(unix_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _settings(tree: object) -> str:
    return msgspec.yaml.encode(tree).decode()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadgen._html", description="Makes one page of the results of one or more runs.")
    parser.add_argument("results", nargs="+", metavar="RESULT", help="a file that --json-out has written")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="the page")
    options = parser.parse_args()
    runs = _named(options.results)
    try:
        Path(options.out).write_text(page(runs), encoding="utf-8")
    except OSError as error:
        sys.exit(f"{options.out}: {error.strerror}")


if __name__ == "__main__":
    main()
