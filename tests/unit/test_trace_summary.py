"""`inference-service traces`: real trace files in, the right numbers out."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from inference_service.config import Telemetry
from inference_service.telemetry import names
from inference_service.telemetry.spans import TraceFileError, join, read_spans
from inference_service.telemetry.summary import percentile, print_traces
from inference_service.telemetry.tracing import Tracing

MS = 1_000_000
START = 10**15


def write_request(
    server: Tracing, client: Tracing, number: int, ttft_ms: int = 30, decode_ms: int = 100, code: str = "OK", arrival: int = START
) -> None:
    """Queue 10 ms, first token after `ttft_ms`, 11 tokens; the client sees everything a millisecond later, at both ends."""
    span = client.client_span(arrival - MS)
    first, last = arrival + ttft_ms * MS, arrival + (ttft_ms + decode_ms) * MS
    server.request(span.metadata, arrival).end(
        code,
        end_ns=last,
        scheduled_ns=arrival + 10 * MS,
        first_token_ns=first,
        last_token_ns=last,
        request_id=f"request[{number}]",
        completion_tokens=11,
    )
    span.end(code, end_ns=last + MS, first_token_ns=first + MS, last_token_ns=last + MS, completion_tokens=11)


def tracings(directory: Path) -> tuple[Tracing, Tracing]:
    return (
        Tracing(Telemetry(trace_file=str(directory / "server.jsonl")), names.SERVER_SERVICE),
        Tracing(Telemetry(trace_file=str(directory / "loadgen.jsonl")), names.LOADGEN_SERVICE),
    )


def printed(*paths: Path, slowest: int = 5, width: int = 100) -> str:
    out = io.StringIO()
    print_traces(paths, slowest, Console(file=out, width=width))
    return out.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"│ {name} ")]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_numbers(tmp_path: Path) -> None:
    server, client = tracings(tmp_path)
    for number in range(101):
        write_request(server, client, number, ttft_ms=20 + number, decode_ms=100)
    write_request(server, client, 101, code="CANCELLED", ttft_ms=20, decode_ms=10_000)
    server.request((), START).end("RESOURCE_EXHAUSTED", end_ns=START + MS)
    server.shutdown()
    client.shutdown()
    text = printed(tmp_path / "loadgen.jsonl", tmp_path / "server.jsonl", slowest=2)

    assert "103 requests" in text
    assert row(text, "OK") == ["101", "101"]
    assert row(text, "CANCELLED") == ["1", "1"]
    assert row(text, "RESOURCE_EXHAUSTED") == ["0", "1"]
    assert row(text, "TTFT, server")[0] == "102"
    assert row(text, "TTFT, client - server") == ["102", "2.00", "2.00", "2.00", "2.00"]
    assert row(text, "queue") == ["102", "10.00", "10.00", "10.00", "10.00"]
    assert row(text, "TPOT, client")[1] == "10.00"
    # 101 requests of 120 to 220 ms: the percentiles fall on whole milliseconds.
    assert row(text, "e2e of status OK, server") == ["101", "170.00", "210.00", "215.00", "219.00"]

    first, second = text.split("\n\n")[-2:]
    assert first.startswith("request request[101]")
    assert "status CANCELLED" in first
    assert second.startswith("request request[100]")
    assert [line.split()[0] for line in second.strip().splitlines()[-5:]] == ["client", "server", "queue", "prefill", "decode"]


def test_waterfall_is_to_scale(tmp_path: Path) -> None:
    server, client = tracings(tmp_path)
    write_request(server, client, 0, ttft_ms=40, decode_ms=80)
    server.shutdown()
    client.shutdown()
    bars = {line.split()[0]: line[10:70] for line in printed(tmp_path / "server.jsonl", width=86).splitlines()[-4:]}
    assert bars["server"] == "█" * 60
    assert bars["queue"].rstrip() == "█" * 5
    assert bars["prefill"].rstrip() == " " * 5 + "█" * 15
    assert bars["decode"] == " " * 20 + "█" * 40


def test_joins_by_span_not_by_trace_alone(tmp_path: Path) -> None:
    """A client may put several requests into one trace, or send one again."""
    server, client = tracings(tmp_path)
    span = client.client_span(START)
    for attempt in range(2):
        server.request(span.metadata, START + attempt).end("OK", end_ns=START + 5 * MS, admitted=True, request_id=str(attempt))
    span.end("OK", end_ns=START + 9 * MS)
    server.shutdown()
    client.shutdown()
    requests = join(read_spans([tmp_path / "loadgen.jsonl", tmp_path / "server.jsonl"])[0])
    assert [(request.client is not None, request.server is not None, list(request.phases)) for request in requests] == [
        (True, True, ["queue"]),
        (False, True, ["queue"]),
    ]


def test_torn_and_foreign_lines(tmp_path: Path) -> None:
    server, client = tracings(tmp_path)
    write_request(server, client, 0)
    server.shutdown()
    path = tmp_path / "server.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:100])
    assert "not spans" not in printed(path), "a last line may be in the making"
    path.write_bytes(b'{"level": "info"}\n\xff\n' + whole + whole[:100])
    text = printed(path)
    assert "2 lines are not spans" in text
    assert "1 requests" in text


def test_missing_and_empty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceFileError, match=r"absent\.jsonl: no such file"):
        printed(tmp_path / "absent.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(TraceFileError, match=r"empty\.jsonl: the file is empty"):
        printed(empty)
    empty.write_text("hello\n")
    with pytest.raises(TraceFileError, match=r"empty\.jsonl: no spans in it"):
        printed(empty)
    with pytest.raises(TraceFileError, match="Is a directory"):
        printed(tmp_path)


def test_percentile_interpolates() -> None:
    assert percentile([3.0], 99) == 3.0
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2], 100) == 2
