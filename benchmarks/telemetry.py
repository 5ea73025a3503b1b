"""What telemetry costs the front end: CPU time a step and a request, and of each scrape.

    python benchmarks/telemetry.py

Metrics are recorded as the server does, with a Prometheus reader; spans are queued, and written to a file by a thread whose time counts
as well. The least of some rounds is given, since whatever else the machine does can only add.
"""

from __future__ import annotations

import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from inference_service.config import Telemetry
from inference_service.messages import StepWork
from inference_service.telemetry import names
from inference_service.telemetry.metrics import EngineMetrics, Metrics, RequestMetrics
from inference_service.telemetry.tracing import Tracing

ROUNDS = 7
MS = 10**6
TIMES: dict[str, Any] = {"end_ns": 90 * MS, "scheduled_ns": 3 * MS, "first_token_ns": 20 * MS, "last_token_ns": 89 * MS}


def cost_us(act: Callable[[], object], repeats: int) -> float:
    """Microseconds of this process's CPU time that one `act` takes."""
    taken = []
    for _ in range(ROUNDS):
        before = time.process_time()
        for _ in range(repeats):
            act()
        taken.append((time.process_time() - before) / repeats)
    return 1e6 * min(taken)


def main() -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as directory:
        metrics, off = Metrics(Telemetry(metrics_port=0)), Metrics(Telemetry())
        tracing = Tracing(Telemetry(trace_file=f"{directory}/traces.jsonl"), names.SERVER_SERVICE)
        work, url = StepWork(32, 100, 5 * MS, 0), f"http://127.0.0.1:{metrics.port}/metrics"
        steps, requests = EngineMetrics(metrics), RequestMetrics(metrics, "model")
        nothing = RequestMetrics(off, "model")
        table = Table(title="us of CPU time")
        table.add_column("what")
        table.add_column("us", justify="right")
        for what, act, repeats in (
            ("metrics of a step", lambda: steps.step(work), 2000),
            ("metrics of a request", lambda: requests.ended("OK", arrival_ns=MS, longest_answer=30, **TIMES), 500),
            ("metrics of a request, told nowhere", lambda: nothing.ended("OK", arrival_ns=MS, longest_answer=30, **TIMES), 2000),
            ("spans of a request, in a file", lambda: tracing.request((), MS).end("OK", **TIMES), 500),
            ("a scrape", lambda: urllib.request.urlopen(url).read(), 20),
        ):
            table.add_row(what, f"{cost_us(act, repeats):,.1f}")
        Console(width=100).print(table)
        metrics.shutdown()
        tracing.shutdown()


if __name__ == "__main__":
    main()
