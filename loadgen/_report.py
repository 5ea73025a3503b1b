"""The result of a run: as tables and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from loadgen._result import Interval, Level, Repeated, Result, Spread

FIGURES = {"mean": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99", "p99_9": "p99.9", "max": "max"}
"""By their names in Spread."""
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}
_MORE = {
    "scheduled_ttft_ms": "TTFT, from due",
    "scheduled_e2e_ms": "E2E, from due",
    "server_ttft_ms": "TTFT, server's",
    "queue_ms": "queue",
    "user_tokens_per_s": "user tokens/s",
}
"""Shown where there are samples."""
REPEATED = {"tokens.output_per_s": "tokens/s", "ttft_ms.p50": "TTFT p50", "tpot_ms.p50": "TPOT p50", "e2e_ms.p50": "E2E p50"}
"""By path in Level: what is said of repeats."""


def write_result(result: Result, path: str) -> None:
    """Write the JSON file. Raises OSError."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def measures_of(level: Level) -> dict[str, Spread]:
    """What to show of a level's distributions, by title."""
    spreads: dict[str, Spread] = {title: getattr(level, name) for name, title in (LATENCIES | _MORE).items()}
    return {title: spread for title, spread in spreads.items() if spread.count or title in LATENCIES.values()}


def name_of(repeated: Repeated, levels: list[Level]) -> str:
    """That of the first of them."""
    return next(level.name for level in levels if (level.concurrency, level.rate) == (repeated.concurrency, repeated.rate))


def print_result(result: Result) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for level in result.levels:
        _print_level(console, result, level)
    if len(result.levels) > 1:
        console.print(_sweep_table(result))
    if result.repeated:
        console.print(_repeats_table(result))
    if result.search:
        best = result.search.best
        console.print(f"\nhighest load within the SLO: {'none' if best is None else f'{best:g}'}")
    if not result.verdict.trusted:
        console.print("\nNOT TRUSTED: " + "; ".join(result.verdict.reasons), markup=False)


def _print_level(console: Console, result: Result, level: Level) -> None:
    requests, tokens, workload = level.requests, level.tokens, result.loadtest["workload"]
    console.print()
    console.print(
        f"{result.target}, {workload['input_tokens']} tokens in, {workload['output_tokens']} out; "
        f"{level.name} (mean in flight {level.mean_in_flight:.2f}), {level.duration_s:.1f} s",
        markup=False,
    )
    console.print(
        f"requests: {requests.completed} completed ({requests.completed_per_s:.2f}/s), {requests.failed} failed, "
        f"{requests.cut_off} cut off by the end"
    )
    console.print(
        f"tokens/s: {tokens.output_per_s:.1f} output, {tokens.input_per_s:.1f} input "
        f"({tokens.cached} of {tokens.input} from the prefix cache)"
    )
    if level.slo and level.slo.share is not None:
        console.print(f"SLO: {level.slo.share:.1%} of the requests kept it; goodput {requests.good_per_s:.2f}/s")
    for reason in level.steady.reasons:
        console.print(f"not steady: {reason}")
    lag_ms, cpu = level.receive_lag_ms.p99, level.client_cpu
    if lag_ms is not None and cpu.mean is not None:
        console.print(f"load generator: {lag_ms:.1f} ms late at p99; {cpu.mean:.0%} of a core a process, {cpu.busiest:.0%} at most")
    for kind, errors in level.errors.items():
        console.print(f"  {kind}: {errors.count}, such as {errors.example}", markup=False)
    console.print(_latency_table(level))


def _latency_table(level: Level) -> Table:
    table = _table("ms", *FIGURES.values(), "samples")
    for title, spread in measures_of(level).items():
        table.add_row(title, *(_shown(getattr(spread, name)) for name in FIGURES), str(spread.count))
    return table


def _sweep_table(result: Result) -> Table:
    """One line a level."""
    table = _table("level", "req/s", "tokens/s", "TTFT\np50", "\np99", "TPOT\np50", "\np99", "SLO", "trusted", title="all levels (ms)")
    for level in result.levels:
        table.add_row(
            level.name,
            f"{level.requests.completed_per_s:.2f}",
            f"{level.tokens.output_per_s:.0f}",
            *map(_shown, (level.ttft_ms.p50, level.ttft_ms.p99, level.tpot_ms.p50, level.tpot_ms.p99)),
            "-" if level.slo is None else "met" if level.slo.met else "missed",
            "yes" if level.verdict.trusted else "NO",
        )
    return table


def _repeats_table(result: Result) -> Table:
    table = _table("level", *REPEATED.values(), title="means of the repeats ± half their 95 % confidence intervals (ms)")
    for repeated in result.repeated:
        table.add_row(name_of(repeated, result.levels), *(_mean(repeated.figures.get(path)) for path in REPEATED))
    return table


def _table(first: str, *others: str, title: str | None = None) -> Table:
    # Nine columns in 80 characters.
    table = Table(first, *others, title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _mean(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    half = interval.high - interval.mean
    return f"{_shown(interval.mean)} ± {half:.{0 if half >= 10 else 1}f}"


def _shown(milliseconds: float | None) -> str:
    """Four digits or so."""
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.{0 if milliseconds >= 1000 else 1 if milliseconds >= 100 else 2}f}"
