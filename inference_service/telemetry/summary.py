"""`inference-service traces`: what trace files say of a run, and where the slowest requests spent their time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from inference_service.telemetry import names
from inference_service.telemetry.spans import Request, Span, join, read_spans

_PERCENTILES = (50, 90, 95, 99)
_STYLES = {"client": "white", "server": "cyan", names.QUEUE_SPAN: "yellow", names.PREFILL_SPAN: "magenta", names.DECODE_SPAN: "green"}


def print_traces(paths: Sequence[str | Path], slowest: int = 5, console: Console | None = None) -> None:
    """Print requests by status, latencies by percentile and the slowest requests as waterfalls.

    The files may be of servers and load generators in any order. Raises TraceFileError for one that is missing or empty.
    """
    console = console or Console()
    spans, bad_lines = read_spans(paths)
    requests = join(spans)
    if bad_lines:
        console.print(f"{bad_lines} lines are not spans and were left out", style="yellow")
    console.print(_status_table(requests))
    console.print(_latency_table(requests))
    for request in sorted(requests, key=lambda request: request.outer.duration_ns, reverse=True)[:slowest]:
        console.print()
        console.print(Text(_headline(request), style="bold"))
        console.print(_waterfall(request, bar_width=max(20, min(60, console.width - 26))))


def percentile(values: Iterable[float], percent: float) -> float:
    """Interpolated between the two nearest of the values, of which there must be one."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _status_table(requests: Sequence[Request]) -> Table:
    by_client = Counter(request.client.code for request in requests if request.client)
    by_server = Counter(request.server.code for request in requests if request.server)
    table = Table(title=f"{len(requests)} requests")
    for header in ("status", "client spans", "server spans"):
        table.add_column(header, justify="left" if header == "status" else "right")
    for code in sorted({*by_client, *by_server}, key=lambda code: (code != "OK", code)):
        table.add_row(Text(code), str(by_client[code]), str(by_server[code]))
    return table


def _latency_table(requests: Sequence[Request]) -> Table:
    clients = [request.client for request in requests if request.client]
    servers = [request.server for request in requests if request.server]
    rows: list[tuple[str, list[float]]] = [
        ("TTFT, client", _known(span.ttft_ns for span in clients)),
        ("TTFT, server", _known(span.ttft_ns for span in servers)),
        ("TTFT, client - server", _known(_ttft_difference(request) for request in requests)),
        ("TPOT, client", _known(span.tpot_ns for span in clients)),
        ("TPOT, server", _known(span.tpot_ns for span in servers)),
        ("queue", _phase_durations(requests, names.QUEUE_SPAN)),
        ("prefill", _phase_durations(requests, names.PREFILL_SPAN)),
        ("e2e of status OK, client", [span.duration_ns for span in clients if span.code == "OK"]),
        ("e2e of status OK, server", [span.duration_ns for span in servers if span.code == "OK"]),
    ]
    table = Table(title="milliseconds")
    for header in ("", "count", *(f"p{percent}" for percent in _PERCENTILES)):
        table.add_column(header, justify="right" if header else "left")
    for name, values in rows:
        if values:
            table.add_row(name, str(len(values)), *(_milliseconds(percentile(values, percent)) for percent in _PERCENTILES))
    return table


def _waterfall(request: Request, bar_width: int) -> Text:
    """A bar for each span, all on one time axis."""
    begin = min(span.start_ns for _, span in request.spans)
    end = max(span.end_ns for _, span in request.spans)
    rows = []
    for name, span in request.spans:
        start, stop = (round((time - begin) / max(end - begin, 1) * bar_width) for time in (span.start_ns, span.end_ns))
        start = min(start, bar_width - 1)
        bar = (" " * start + "█" * max(stop - start, 1)).ljust(bar_width)
        label, milliseconds = f"  {name:<8}", f"{_milliseconds(span.duration_ns):>11} ms"
        rows.append(Text.assemble(label, (bar, _STYLES.get(name, "blue")), milliseconds))
    return Text("\n").join(rows)


def _headline(request: Request) -> str:
    attributes: dict[str, object] = {}
    for span in (request.client, request.server):
        attributes |= span.attributes if span else {}
    known = {
        "request": attributes.get(names.REQUEST_ID),
        "trace": request.outer.trace_id,
        "status": request.outer.code,
        "prompt": attributes.get(names.INPUT_TOKENS),
        "cached": attributes.get(names.CACHED_TOKENS),
        "output": attributes.get(names.OUTPUT_TOKENS),
        "preemptions": attributes.get(names.PREEMPTIONS) or None,
        "TTFT": _ttft_text(request.outer),
    }
    return "  ".join(f"{name} {value}" for name, value in known.items() if value not in (None, ""))


def _ttft_text(span: Span) -> str:
    return "" if span.ttft_ns is None else f"{_milliseconds(span.ttft_ns)} ms"


def _ttft_difference(request: Request) -> int | None:
    """What the client waited for its first token beyond what the server took: the network, and both ends' gRPC."""
    client, server = (span.ttft_ns if span else None for span in (request.client, request.server))
    return None if client is None or server is None else client - server


def _phase_durations(requests: Sequence[Request], phase: str) -> list[float]:
    return [request.phases[phase].duration_ns for request in requests if phase in request.phases]


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _milliseconds(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.2f}"
