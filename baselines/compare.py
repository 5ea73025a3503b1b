"""Compare servers side by side: the same requests, one target after the other.

    python -m baselines.compare --config FILE --targets ours,vllm --out DIR [--resume]

Every finished cell is in DIR/result.json at once, so that a table can be made in several runs: with `--time-limit` a run begins no cell
that it could not end, with `--keep` the server goes on for the next run, and `--resume` measures only what is missing or was not measured.

Exit status: 0 all cells are good, 1 some are not, 2 wrong usage or settings, 3 time was up before all were measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from baselines.cells import Cell, Row, parse_cells
from baselines.endpoints import EndpointError, Server, is_ready
from baselines.load import LoadError, run_load
from baselines.memory import PeakMemory
from baselines.report import failed_row, key, make_row, print_table, read_rows, write_rows
from inference_service.config import Config, ConfigError, load_config
from inference_service.fetch import resolve_model

_AROUND_S = 25.0
"""What a cell takes beside its window: starting, warming up, stopping."""
_PROBE_S = 30.0


class Comparison:
    """The cells of all targets; rows go to the result as they come."""

    def __init__(self, config: Config, names: list[str], cells: list[Cell], directory: Path) -> None:
        self._config = config
        self._names = names
        self._cells = cells
        self._directory = directory
        self._file = directory / "config.yaml"
        self._model, self._experts = _model(config)
        self._result = directory / "result.json"
        self.rows = read_rows(self._result)

    def run(self, time_limit_s: float | None, keep: bool) -> bool:
        """False where the time was up before all was measured."""
        self._file.write_text(yaml.safe_dump(msgspec.to_builtins(self._config), sort_keys=False))
        self._deadline = time.monotonic() + time_limit_s if time_limit_s else float("inf")
        in_time = True
        for name in self._names:
            todo = [cell for cell in self._cells if not self._is_done(name, cell)]
            if not todo or not in_time:
                continue
            for other in self._config.comparison.targets:
                if other != name:
                    self._server(other).stop()  # one GPU holds one of them
            in_time = self._measure(self._server(name), todo)
        if not keep:
            for name in self._config.comparison.targets:
                self._server(name).stop()
        return in_time

    def wanted(self) -> list[Row]:
        """The result's rows of these targets and cells."""
        keys = {key(failed_row(name, cell, shape, "")) for name in self._names for cell in self._cells for shape in cell.shapes}
        return [row for row in self.rows if key(row) in keys]

    def _measure(self, server: Server, todo: list[Cell]) -> bool:
        for number, cell in enumerate(todo):
            try:
                if self._has_time(cell):
                    server.ensure()
                # Again, since a server may take long to start.
                if not self._has_time(cell):
                    print(f"time is up with {len(todo) - number} cells of {server.name} left: run again with --resume", flush=True)
                    return False
                rows = self._measure_cell(server, cell)
            except EndpointError as error:
                for left in todo[number:]:
                    self._add([failed_row(server.name, left, shape, str(error)) for shape in left.shapes])
                print(error, file=sys.stderr, flush=True)
                return True
            self._add(rows)
            for row in rows:
                print(_line(cell, row), flush=True)
        return True

    def _has_time(self, cell: Cell) -> bool:
        return time.monotonic() + cell.measured_s(self._config.comparison.window_s) + _AROUND_S < self._deadline

    def _measure_cell(self, server: Server, cell: Cell) -> list[Row]:
        with PeakMemory(server.pid) as memory:
            try:
                summaries = run_load(self._file, self._config, server.url, cell, self._directory)
            except LoadError as error:
                return [failed_row(server.name, cell, shape, str(error)) for shape in cell.shapes]
        if any(summary["errors"] for summary in summaries) and not is_ready(server.url):
            examples = [errors["example"] for summary in summaries for errors in summary["errors"].values()]
            return [failed_row(server.name, cell, shape, f"{server.name} died: {examples[0]}") for shape in cell.shapes]
        extra = _probe(self._config.comparison.targets[server.name].probe, cell.concurrency)
        batch = extra.get("experts_batch") or cell.concurrency
        return [
            make_row(
                server.name,
                cell,
                shape,
                summary,
                extra=extra,
                expected_distinct=self._expected_distinct(batch),
                peak_memory_gib=memory.peak_gib,
                start_s=server.start_s,
            )
            for shape, summary in zip(cell.shapes, summaries, strict=True)
        ]

    def _server(self, name: str) -> Server:
        return Server(name, self._config.comparison.targets[name], self._directory, self._model, self._file)

    def _is_done(self, name: str, cell: Cell) -> bool:
        done = {key(row) for row in self.rows if "failure" not in row}
        return all(key(failed_row(name, cell, shape, "")) in done for shape in cell.shapes)

    def _add(self, rows: list[Row]) -> None:
        """In the place of what could not be measured before."""
        keys = {key(row) for row in rows}
        self.rows = [row for row in self.rows if key(row) not in keys] + rows
        write_rows(self._result, self.rows)

    def _expected_distinct(self, batch: int) -> float | None:
        """Experts a layer that `batch` tokens touch where each takes k of E at random."""
        experts, chosen = self._experts
        return experts * (1 - (1 - chosen / experts) ** batch) if experts else None


def _model(config: Config) -> tuple[str, tuple[int, int]]:
    """The model's directory, and how many experts it has and takes; zeros where that is not known or it has none."""
    try:
        directory = resolve_model(config.model.path)
        shape = json.loads((directory / "config.json").read_text())
    except (OSError, RuntimeError, ValueError):
        # Servers that run already need no model here.
        return config.model.path, (0, 0)
    return str(directory), (int(shape.get("num_experts") or 0), int(shape.get("num_experts_per_tok") or 0))


def _probe(command: str, concurrency: int) -> dict[str, Any]:
    """More figures of the target's own; none where its command fails, with a warning."""
    if not command:
        return {}
    command = command.replace("{python}", sys.executable).replace("{concurrency}", str(concurrency))
    try:
        ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=_PROBE_S, check=True)
        figures = json.loads(ran.stdout)
        if isinstance(figures, dict):
            return figures
        problem = "not a JSON object"
    except (subprocess.SubprocessError, json.JSONDecodeError) as error:
        problem = str(error)
    print(f"probe {command!r}: {problem}", file=sys.stderr, flush=True)
    return {}


def _line(cell: Cell, row: Row) -> str:
    if failure := row.get("failure"):
        return f"{row['target']} {cell}: {failure}"
    figures = f"{row['output_tokens_per_s']:.0f} tokens/s"
    for title, latency, name in (("TTFT", "ttft_ms", "p50"), ("TPOT", "tpot_ms", "p50"), ("late", "receive_lag_ms", "p99")):
        if (value := row[latency][name]) is not None:
            figures += f", {title} {name} {value:.2f} ms"
    return f"{row['target']} {cell}: {figures}" + "".join(f"; INVALID: {reason}" for reason in row.get("invalid", []))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m baselines.compare", description="Compare servers side by side.")
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file; its section `comparison` names the targets")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override a value; may be repeated")
    parser.add_argument("--targets", help="such as ours,vllm: the first is compared with each other; by default all")
    parser.add_argument("--cells", metavar="SPEC", help="goes before comparison.cells")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="for result.json, the servers' logs and the configuration")
    parser.add_argument("--resume", action="store_true", help="measure what DIR/result.json lacks")
    parser.add_argument("--keep", action="store_true", help="leave the servers running at the end")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, help="begin no cell that would end later")
    args = parser.parse_args(argv)
    try:
        config = load_config(args.config, args.set)
        names = args.targets.split(",") if args.targets else list(config.comparison.targets)
        cells = parse_cells(args.cells or config.comparison.cells)
        if not names:
            raise ConfigError("comparison.targets: none to compare")
        if unknown := [name for name in names if name not in config.comparison.targets]:
            raise ConfigError(f"--targets: {unknown[0]} is not in comparison.targets, which has {', '.join(config.comparison.targets)}")
        args.out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(config, names, cells, args.out.absolute())
        if comparison.rows and not args.resume:
            raise ConfigError(f"{args.out}/result.json is there already: --resume, or another --out")
    except (ValueError, OSError) as error:
        print(f"baselines.compare: {error}", file=sys.stderr)
        sys.exit(2)
    in_time = comparison.run(args.time_limit, args.keep)
    print_table(comparison.rows, names)
    if not in_time:
        sys.exit(3)
    sys.exit(any("failure" in row or "invalid" in row for row in comparison.wanted()))


if __name__ == "__main__":
    main()
