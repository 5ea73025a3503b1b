"""Compare servers side by side: the same requests to each target.

    python -m baselines.compare --config FILE --targets ours,vllm --out DIR [--repeats 3] [--resume]

Every finished measurement is in DIR/result.json at once, so that a table can be made in several runs: with `--time-limit` a run begins no
cell that it could not end, with `--keep` the server goes on for the next run, with `--block` only one start of each target is measured, and
`--resume` measures only what is missing, failed or invalid.

Exit status: 0 all cells are good, 1 some are not, 2 wrong usage or settings, 3 time was up before all were measured.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from baselines.cells import Cell, Row, parse_cells
from baselines.endpoints import EndpointError, Server, is_ready
from baselines.load import LoadError, run_load
from baselines.memory import PeakMemory
from baselines.metrics import scrape
from baselines.report import print_table, write_report
from baselines.rows import failed_row, key, keys_of, make_row, read_rows, refusal, write_rows
from baselines.schedule import BLOCKS, INTERLEAVED, Step, blocks, interleaved, is_interleaved
from baselines.traces import TraceReceiver
from inference_service.config import Config, ConfigError, load_config
from inference_service.fetch import resolve_model
from inference_service.models.config_json import ModelError, read_json

_AROUND_S = 25.0
"""What a cell takes beside its window: starting, warming up, stopping."""
_PROBE_S = 30.0
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""What config.json may call their number."""


class Comparison:
    """Runs the steps; rows go to the result as they come."""

    def __init__(self, config: Config, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._file = directory / "config.yaml"
        self._result = directory / "result.json"
        self._rehearsed: set[tuple[str, int, Cell]] = set()
        self._anew: set[tuple[str, int, int, int]] = set()
        """Keys, without the target, of what is measured anew by all servers side by side, and is not yet."""
        self.model = _model(config.model.path)
        self._experts = _experts(self.model)
        self.rows = read_rows(self._result)

    def run(self, steps: Sequence[Step], time_limit_s: float | None, keep: bool) -> bool:
        """False where the time was up before all was measured. Raises EndpointError where a server that was stopped left something."""
        self._file.write_text(yaml.safe_dump(msgspec.to_builtins(self._config), sort_keys=False))
        self._deadline = time.monotonic() + time_limit_s if time_limit_s else float("inf")
        beside_others = any(step.schedule == INTERLEAVED for step in steps)
        self._servers = {name: self._server(name, beside_others) for name in self._config.comparison.targets}
        try:
            with self._receivers({step.target for step in steps}) as self._traces:
                in_time = self._run(steps)
                if not keep:
                    self._stop_all()  # before the receivers, which servers tell their last spans
        finally:
            if not keep:
                self._stop_all()
        return in_time

    def wanted(self, steps: Sequence[Step]) -> list[Row]:
        """The result's rows of these steps."""
        keys = set[Any]().union(*map(keys_of, steps))
        return [row for row in self.rows if key(row) in keys]

    def _run(self, steps: Sequence[Step]) -> bool:
        steps = self._unmeasured(steps)
        lost = self._all_up(steps)
        for number, step in enumerate(steps):
            if not (failure := lost.get((step.target, step.block), "")):
                if not self._has_time(step):
                    return self._out_of_time(len(steps) - number)
                try:
                    self._make_ready(step)
                    # Again, since a server may take long to start.
                    if not self._has_time(step):
                        return self._out_of_time(len(steps) - number)
                    rows = self._measure(step)
                except EndpointError as error:
                    failure = lost[step.target, step.block] = str(error)
                    print(failure, file=sys.stderr, flush=True)
            if failure:
                rows = [failed_row(step, shape, failure) for shape in step.cell.shapes]
            self._add(rows)
            for row in rows:
                print(_line(step, row), flush=True)
        return True

    def _all_up(self, steps: Sequence[Step]) -> dict[tuple[str, int], str]:
        """Where cells go from one server to the next, start all before the first; why some are not up, by target and block."""
        lost = {}
        for target in dict.fromkeys(step.target for step in steps if step.schedule == INTERLEAVED):
            try:
                self._servers[target].ensure(traces=self._traces.get(target, ""))
            except EndpointError as error:
                lost[target, 1] = str(error)
                print(error, file=sys.stderr, flush=True)
        return lost

    def _out_of_time(self, left: int) -> bool:
        print(f"time is up with up to {left} measurements left: run again with --resume", flush=True)
        return False

    def _has_time(self, step: Step) -> bool:
        needed_s = step.cell.measured_s(self._config.comparison.window_s) + _AROUND_S
        if self._needs_rehearsal(step):
            needed_s += self._config.comparison.rehearsal_s + _AROUND_S
        return time.monotonic() + needed_s < self._deadline

    def _make_ready(self, step: Step) -> None:
        """In a block its server runs alone: one GPU holds one."""
        if step.schedule == BLOCKS:
            for name, server in self._servers.items():
                if name != step.target:
                    server.stop()
        self._servers[step.target].ensure(step.block, self._traces.get(step.target, ""))

    def _measure(self, step: Step) -> list[Row]:
        """Raises EndpointError where the server hangs and is not ours to start again."""
        server, cell = self._servers[step.target], step.cell
        window_s = cell.measured_s(self._config.comparison.window_s)
        try:
            if self._needs_rehearsal(step):
                self._rehearsed.add((step.target, step.block, cell))
                self._load(step, f"rehearsal {step.block}", self._config.comparison.rehearsal_s)
            with PeakMemory(server.pid) as memory:
                summaries = self._load(step, step.round, window_s)
        except LoadError as error:
            return [failed_row(step, shape, str(error)) for shape in cell.shapes]
        if failure := self._lost(server, summaries, window_s):
            return [failed_row(step, shape, failure) for shape in cell.shapes]
        facts = server.facts | _probe(self._config.comparison.targets[server.name].probe, cell.concurrency)
        self._scrape(server, step)
        return [
            failed_row(step, shape, failure)
            if (failure := refusal(shape, summary))
            else make_row(
                step,
                shape,
                summary,
                facts=facts,
                expected_distinct=self._expected_distinct(facts.get("experts_batch") or cell.concurrency),
                peak_memory_gib=memory.peak_gib,
            )
            for shape, summary in zip(cell.shapes, summaries, strict=True)
        ]

    def _load(self, step: Step, round: str, window_s: float) -> list[dict[str, Any]]:
        return run_load(self._file, self._config, self._servers[step.target].url, step.cell, self._directory, round, window_s)

    def _needs_rehearsal(self, step: Step) -> bool:
        return bool(self._config.comparison.rehearsal_s) and (step.target, step.block, step.cell) not in self._rehearsed

    def _lost(self, server: Server, summaries: list[dict[str, Any]], window_s: float) -> str:
        """How the server was lost under load, if it was; then it is stopped, so that the next step starts it anew."""
        examples = [errors["example"] for summary in summaries for errors in summary["errors"].values()]
        if examples and not is_ready(server.url):
            return f"{server.name} died: {examples[0]}"
        if any(summary["tokens"]["output"] or summary["requests"]["completed"] for summary in summaries):
            return ""
        failure = f"{server.name} hangs: not a token came in {window_s:g} s{': ' + examples[0] if examples else ''}"
        if not server.pid:
            raise EndpointError(failure)
        server.stop()
        return failure

    def _scrape(self, server: Server, step: Step) -> None:
        if server.peer and server.peer.metrics:
            name = re.sub(r"[^\w.,+-]", "-", f"{step.target}-{step.cell}-{step.block}.{step.repeat + 1}")
            scrape(server.url, server.peer.metrics, self._directory / "metrics" / f"{name}.txt")

    @contextmanager
    def _receivers(self, targets: set[str]) -> Iterator[dict[str, str]]:
        """Where each target may send its traces."""
        if not self._config.comparison.traces:
            yield {}
            return
        receivers = {name: TraceReceiver(self._directory / f"{name}.traces.jsonl") for name in targets}
        for receiver in receivers.values():
            receiver.start()
        try:
            yield {name: receiver.address for name, receiver in receivers.items()}
        finally:
            for receiver in receivers.values():
                receiver.stop()

    def _server(self, name: str, beside_others: bool) -> Server:
        return Server(name, self._config, self._file, str(self.model or self._config.model.path), self._directory, beside_others)

    def _stop_all(self) -> None:
        """Raises EndpointError of the last that left something, when all have been stopped."""
        problem = None
        for server in self._servers.values():
            try:
                server.stop()
            except EndpointError as error:
                problem = error
        if problem:
            raise problem

    def _unmeasured(self, steps: Sequence[Step]) -> list[Step]:
        """What has no good row. Where an invalid one is of servers side by side, all that it stands beside is measured anew with it.

        What has no row at all comes first, lest a cell that is invalid each time take the time of all others.
        """
        there = {key(row) for row in self.rows}
        good = {key(row) for row in self.rows if "failure" not in row and not row.get("invalid")}
        invalid = {key(row) for row in self.rows if row.get("invalid")}
        anew = {(step.cell, step.repeat) for step in steps if step.schedule == INTERLEAVED and keys_of(step) & invalid}
        self._anew = {found[1:] for step in steps if (step.cell, step.repeat) in anew for found in keys_of(step)}
        left = [step for step in steps if (step.cell, step.repeat) in anew or not keys_of(step) <= good]
        return sorted(left, key=lambda step: bool(keys_of(step) & there))

    def _add(self, rows: list[Row]) -> None:
        """In the place of what could not be measured before, and of all beside it that is measured anew: old and new make no pair."""
        keys = {key(row) for row in rows}
        anew = {key(row)[1:] for row in rows} & self._anew
        self._anew -= anew
        beside = {key(row) for row in self.rows if row.get("schedule") == INTERLEAVED and key(row)[1:] in anew}
        self.rows = [row for row in self.rows if key(row) not in keys | beside] + rows
        write_rows(self._result, self.rows)

    def _expected_distinct(self, batch: int) -> float | None:
        """Experts a layer that `batch` tokens touch where each takes k of E at random."""
        experts, chosen = self._experts
        return experts * (1 - (1 - chosen / experts) ** batch) if experts else None


def _model(path: str) -> Path | None:
    """The model's directory; None where there is none, since servers that run already need no model here."""
    try:
        return resolve_model(path)
    except (OSError, RuntimeError, ValueError):
        return None


def _experts(model: Path | None) -> tuple[int, int]:
    """How many experts it has and takes, of a family that is served or not; zeros where that is not known or it has none."""
    try:
        raw = read_json(model) if model else {}
    except ModelError:
        return 0, 0
    experts, chosen = next((raw[name] for name in _EXPERTS if raw.get(name)), 0), raw.get("num_experts_per_tok")
    if isinstance(experts, int) and isinstance(chosen, int) and 0 < chosen <= experts:
        return experts, chosen
    return 0, 0


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


def _line(step: Step, row: Row) -> str:
    name = f"{row['target']} {step.cell}" + (f" (block {step.block}, repeat {step.repeat + 1})" if step.round else "")
    if failure := row.get("failure"):
        return f"{name}: {failure}"
    figures = f"{row['output_tokens_per_s']:.0f} tokens/s"
    for title, latency, of in (("TTFT", "ttft_ms", "p50"), ("TPOT", "tpot_ms", "p50"), ("late", "receive_lag_ms", "p99")):
        if (value := row[latency][of]) is not None:
            figures += f", {title} {of} {value:.2f} ms"
    return f"{name}: {figures}" + "".join(f"; INVALID: {reason}" for reason in row.get("invalid", []))


def _terminated(number: int, frame: object) -> NoReturn:
    """So that servers are stopped where the comparison is."""
    sys.exit(128 + number)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m baselines.compare", description="Compare servers side by side.")
    parser.add_argument("--config", metavar="FILE", required=True, help="YAML file; its section `comparison` names the targets")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override a value; may be repeated")
    parser.add_argument("--targets", help="such as ours,vllm: the first is compared with each other; by default all")
    parser.add_argument("--cells", metavar="SPEC", help="goes before comparison.cells")
    parser.add_argument("--repeats", metavar="N", type=int, help="goes before comparison.repeats")
    parser.add_argument("--block", metavar="N", type=int, help="only the N-th start of each target, such as 2 for the last A of A B A")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="for the result, the servers' logs and the configuration")
    parser.add_argument("--resume", action="store_true", help="measure what DIR/result.json lacks, or has as failed or invalid")
    parser.add_argument("--keep", action="store_true", help="leave the servers running at the end")
    parser.add_argument("--time-limit", metavar="SECONDS", type=float, help="begin no cell that would end later")
    return parser.parse_args(argv)


def _steps(args: argparse.Namespace, config: Config, comparison: Comparison, names: list[str]) -> list[Step]:
    """What is to be measured, in order. Raises ConfigError."""
    cells: list[Cell] = parse_cells(args.cells or config.comparison.cells)
    repeats = args.repeats if args.repeats is not None else config.comparison.repeats
    if repeats < 1:
        raise ConfigError(f"--repeats: {repeats} is less than 1")
    for number, cell in enumerate(cells):
        if any(keys_of(Step("", cell)) & keys_of(Step("", other)) for other in cells[:number]):
            raise ConfigError(f"{'--cells' if args.cells else 'comparison.cells'}: {cell} is there twice")
    together, why = is_interleaved(config, names, comparison.model)
    if together and args.block:
        raise ConfigError("--block: interleaved servers have no blocks; set comparison.interleave=false")
    print(f"{'interleaved' if together else 'in blocks'}: {why}", flush=True)
    if together:
        return interleaved(names, cells, repeats)
    if not args.block:
        return blocks(names, cells, repeats)
    return [Step(name, cell, args.block, repeat) for name in names for repeat in range(repeats) for cell in cells]


def main(argv: Sequence[str] | None = None) -> None:
    args = _arguments(argv)
    try:
        config = load_config(args.config, args.set)
        names = args.targets.split(",") if args.targets else list(config.comparison.targets)
        if not names:
            raise ConfigError("comparison.targets: none to compare")
        if unknown := [name for name in names if name not in config.comparison.targets]:
            raise ConfigError(f"--targets: {unknown[0]} is not in comparison.targets, which has {', '.join(config.comparison.targets)}")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"--targets: {twice[0]} is there twice")
        args.out.mkdir(parents=True, exist_ok=True)
        comparison = Comparison(config, args.out.absolute())
        steps = _steps(args, config, comparison, names)
        if comparison.rows and not args.resume:
            raise ConfigError(f"{args.out}/result.json is there already: --resume, or another --out")
    except (ValueError, OSError) as error:
        print(f"baselines.compare: {error}", file=sys.stderr)
        sys.exit(2)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminated)
    in_time, left = False, ""
    try:
        in_time = comparison.run(steps, args.time_limit, args.keep)
    except EndpointError as error:
        in_time, left = True, str(error)
        print(f"baselines.compare: {error}", file=sys.stderr)
    # All that the file has: of other runs too.
    shown = list(dict.fromkeys([*config.comparison.targets, *names]))
    shown = [name for name in shown if any(row["target"] == name for row in comparison.rows)]
    if comparison.rows:
        print_table(comparison.rows, shown)
        write_report(comparison.rows, shown, args.out / "report.html", args.out / "report.json")
    if not in_time:
        sys.exit(3)
    sys.exit(bool(left) or any("failure" in row or row.get("invalid") for row in comparison.wanted(steps)))


if __name__ == "__main__":
    main()
