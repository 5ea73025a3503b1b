"""The summary of a run: as a table and as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from inference_service.config import Config
from loadgen._histogram import Histogram
from loadgen._measures import Measures

PERCENTILES = (50, 90, 95, 99)
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}


def summarize(measures: Measures, config: Config, target: str, users: int) -> dict[str, Any]:
    """The JSON object of a run. Latencies are milliseconds; rates are over the window, from the first user's start to the last's end."""
    loadtest, seconds = config.loadtest, measures.duration_s
    per_s = (lambda count: count / seconds) if seconds else (lambda count: 0.0)
    return {
        "target": target,
        "concurrency": users,
        "mean_in_flight": per_s(measures.in_flight_ns / 1e9),
        "duration_s": seconds,
        "workload": msgspec.to_builtins(loadtest.workload),
        "seed": loadtest.seed,
        "timeout_s": loadtest.timeout_s,
        "requests": {
            "completed": measures.completed,
            "failed": measures.failed,
            "cut_off": measures.cut_off,
            "completed_per_s": per_s(measures.completed),
        },
        "errors": msgspec.to_builtins(measures.errors),
        "tokens": {
            "input": measures.input_tokens,
            "cached": measures.cached_tokens,
            "output": measures.output_tokens,
            "input_per_s": per_s(measures.input_tokens),
            "output_per_s": per_s(measures.output_tokens),
        },
        "ttft_ms": _latency(measures.ttft),
        "tpot_ms": _latency(measures.tpot),
        "itl_ms": _latency(measures.itl),
        "e2e_ms": _latency(measures.e2e),
        "receive_lag_ms": _latency(measures.receive_lag),
        "client_cpu": {"mean": measures.cpu_ns / measures.wall_ns if measures.wall_ns else None, "busiest": measures.busiest_cpu},
    }


def _latency(histogram: Histogram) -> dict[str, float | int | None]:
    """None where nothing was measured: 0 would look like a very good result."""
    if not histogram.count:
        return {"count": 0, "mean": None, **{f"p{percent}": None for percent in PERCENTILES}, "max": None}
    return {
        "count": histogram.count,
        "mean": histogram.mean / 1e6,
        **{f"p{percent}": histogram.percentile(percent) / 1e6 for percent in PERCENTILES},
        "max": histogram.largest / 1e6,
    }


def write_summary(summary: dict[str, Any], path: str) -> None:
    """Write the JSON file. Raises OSError."""
    Path(path).write_text(json.dumps(summary, indent=2) + "\n")


def print_summary(summary: dict[str, Any]) -> None:
    requests, tokens, workload = summary["requests"], summary["tokens"], summary["workload"]
    console = Console(highlight=False, soft_wrap=True)
    console.print()
    console.print(
        f"{summary['target']}, {workload['input_tokens']} tokens in, {workload['output_tokens']} out; "
        f"concurrency {summary['concurrency']} (mean in flight {summary['mean_in_flight']:.2f}), {summary['duration_s']:.1f} s"
    )
    console.print(
        f"requests: {requests['completed']} completed ({requests['completed_per_s']:.2f}/s), {requests['failed']} failed, "
        f"{requests['cut_off']} cut off by the end"
    )
    console.print(
        f"tokens/s: {tokens['output_per_s']:.1f} output, {tokens['input_per_s']:.1f} input "
        f"({tokens['cached']} of {tokens['input']} from the prefix cache)"
    )
    lag_ms, cpu = summary["receive_lag_ms"]["p99"], summary["client_cpu"]
    if lag_ms is not None:
        console.print(f"load generator: {lag_ms:.1f} ms late at p99; {cpu['mean']:.0%} of a core a process, {cpu['busiest']:.0%} at most")
    for kind, errors in summary["errors"].items():
        console.print(f"  {kind}: {errors['count']}, such as {errors['example']}", markup=False)
    console.print(_latency_table(summary))


def _latency_table(summary: dict[str, Any]) -> Table:
    columns = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    table = Table("ms", *columns, "samples")
    for column in table.columns[1:]:
        column.justify = "right"
    for key, title in LATENCIES.items():
        latency = summary[key]
        table.add_row(title, *(_shown(latency[name]) for name in columns), str(latency["count"]))
    return table


def _shown(milliseconds: float | None) -> str:
    """Short enough for eight columns of an 80-character terminal."""
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.0f}" if milliseconds >= 1000 else f"{milliseconds:.2f}"
