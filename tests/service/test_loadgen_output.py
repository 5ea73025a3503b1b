"""What a run leaves behind: its file of requests, its page, and a page of several runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from loadgen._result import RequestRecord
from tests.service.test_loadgen import ROOT, Stub, locust, result_of, start_stub, well
from tests.service.test_loadgen_shapes import settings
from tests.unit.test_loadgen_html import FIGURES_A_LEVEL, FIGURES_A_REPORT, seen

__all__ = ["start_stub"]


def records_of(path: Path) -> list[RequestRecord]:
    return msgspec.json.Decoder(RequestRecord).decode_lines(path.read_bytes())


@pytest.mark.parametrize("processes", [1, 2])
def test_every_request_is_a_line_that_its_trace_can_be_found_by(start_stub: Callable[..., Stub], tmp_path: Path, processes: int) -> None:
    """Also those of warm-up and drain, and those that fail."""
    stub = start_stub("--first-token-s", "0.03", "--gap-s", "0.005", "--tokens-per-delta", "2", "--fail-every", "5")
    options = settings(concurrency=[2, 3], duration_s=1, warmup_requests=1, requests_file="new/requests.jsonl", html_file="new/report.html")
    ran = locust(tmp_path, "--target", stub.target, "--json-out", "out.json", *options, *(["--processes", "2"] if processes == 2 else []))
    assert ran.returncode == 1, ran.stderr
    requests = stub.stop()["requests"]
    records = records_of(tmp_path / "new" / "requests.jsonl")
    spans = {span["trace_id"]: span for span in map(json.loads, (tmp_path / "loadgen-traces.jsonl").read_text().splitlines())}
    assert len(records) == len(requests) == len(spans)
    assert {record.trace_id for record in records} == spans.keys() == {request["traceparent"][3:35] for request in requests}
    assert len({record.number for record in records}) == len(records)
    assert {record.process for record in records} == set(range(processes))
    outcomes = {request["traceparent"][3:35]: request["outcome"] for request in requests}
    for record in records:
        assert (record.sent_unix_ns, record.ended_unix_ns) == (spans[record.trace_id]["start_ns"], spans[record.trace_id]["end_ns"])
        assert (record.scheduled_unix_ns, record.turn) == (0, 0)
        if outcomes[record.trace_id] == "finished":
            assert (record.outcome, record.error) == ("completed", "")
            assert ([tokens for _, tokens in record.messages], record.output_tokens, record.input_tokens) == ([2, 2, 1], 5, 16)
            first_ns, last_ns = record.messages[0][0], record.messages[-1][0]
            assert (record.first_token_unix_ns - record.sent_unix_ns, record.last_token_unix_ns - record.sent_unix_ns) == (
                first_ns,
                last_ns,
            )
            assert 30e6 <= first_ns < last_ns <= record.ended_unix_ns - record.sent_unix_ns
        else:
            assert (record.outcome, record.error, record.messages) == ("queue_full", "RESOURCE_EXHAUSTED: as scripted", [])
    # The windows of the result hold the lines that were sent in them.
    for level in result_of(tmp_path / "out.json").levels:
        mine = [record for record in records if record.level == level.name]
        inside = [record for record in mine if 0 <= record.sent_unix_ns - level.began_unix_ns < level.duration_s * 1e9]
        ended = Counter(record.outcome for record in inside)
        # The processes' windows do not begin at the same instant.
        assert level.e2e_ms.count == pytest.approx(ended["completed"], abs=3 * processes)
        assert len(mine) > len(inside) > 0
    report = seen((tmp_path / "new" / "report.html").read_text())
    assert "queue_full" in report.text and "RESOURCE_EXHAUSTED: as scripted" in report.text


def test_results_of_two_targets_make_one_page(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stubs = [start_stub("--first-token-s", delay, "--gap-s", "0.01") for delay in ("0.02", "0.1")]
    for number, (stub, levels) in enumerate(zip(stubs, ([1, 3], [1, 2]), strict=True)):
        ran = locust(tmp_path, "--target", stub.target, "--json-out", f"{number}.json", *settings(concurrency=levels, duration_s=1.5))
        assert well(ran.returncode), ran.stderr
        assert "all levels (ms)" in ran.stdout
    made = make_page(tmp_path, "0.json", "1.json")
    assert made.returncode == 0, made.stderr
    report = seen((tmp_path / "report.html").read_text())
    assert report.tags.count("svg") == FIGURES_A_REPORT + 3 * FIGURES_A_LEVEL
    assert all(stub.target in report.text for stub in stubs)


def test_files_that_are_no_results_are_named(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('{"levels": []}')
    for file, reason in (("absent.json", "No such file or directory"), ("wrong.json", "no result of a load test")):
        made = make_page(tmp_path, file)
        assert made.returncode == 1
        assert made.stderr.startswith(f"{file}: {reason}")


def make_page(directory: Path, *results: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadgen._html", *results, "-o", "report.html"]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=60)
