"""The load generator against OpenAI's completions API: real `locust` processes and a scripted server of that API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.test_loadgen import TIMEOUT_S, locust, summary, well

STUB = Path(__file__).with_name("_openai_stub.py")
VOCABULARY = ["--set", "loadtest.workload.vocab_size=900"]


class Stub:
    """The scripted server, in a process of its own."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen([sys.executable, str(STUB), *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready.startswith("ready on "), ready
        self.address = ready.removeprefix("ready on ").strip()

    def stop(self) -> list[dict[str, Any]]:
        """End it; the requests it has seen."""
        self._process.terminate()
        output, _ = self._process.communicate(timeout=TIMEOUT_S)
        requests = json.loads(output)["requests"]
        assert isinstance(requests, list)
        return requests

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def start_stub() -> Iterator[Callable[..., Stub]]:
    stubs: list[Stub] = []

    def start(*options: str) -> Stub:
        stubs.append(Stub(*options))
        return stubs[-1]

    yield start
    for stub in stubs:
        stub.kill()


@pytest.mark.parametrize(("scheme", "path", "options"), [("openai", "", []), ("http", "/v1", ["--split"])])
def test_token_ids_are_counted_whatever_the_text(
    start_stub: Callable[..., Stub], tmp_path: Path, scheme: str, path: str, options: list[str]
) -> None:
    stub = start_stub("--first-token-s", "0.03", "--gap-s", "0.01", "--tokens-per-chunk", "2", *options)
    sampling = ["--set", "loadtest.workload.temperature=0.8", "--set", "loadtest.workload.top_p=0.95"]
    settings = ["-u", "3", "-t", "2", "--stop-timeout", "10", "--json-out", "out.json", *VOCABULARY, *sampling]
    ran = locust(tmp_path, "--target", f"{scheme}://{stub.address}{path}", *settings)
    assert well(ran.returncode), ran.stdout + ran.stderr
    result, seen = summary(tmp_path / "out.json"), stub.stop()
    sent = len(seen)
    assert sent > 3
    for request in seen:
        assert len(request["prompt"]) == 16
        assert max(request["prompt"]) < 900
        assert request["path"] == "/v1/completions"
        fields = ("model", "max_tokens", "ignore_eos", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        assert [request[field] for field in fields] == ["stub", 5, True, True, 0.8, 0.95, 0, 0.0, 1.0]
        assert request["outcome"] == "finished"
    # A user keeps its connection.
    assert len({request["port"] for request in seen}) == 3
    assert result["requests"]["completed"] == sent
    assert (result["tokens"]["input"], result["tokens"]["output"]) == (16 * sent, 5 * sent)
    # Chunks of 2, 2 and 1 tokens, of which two have no text; the one before them, without tokens, counts for nothing.
    assert result["itl_ms"]["count"] == 2 * sent
    assert result["ttft_ms"]["p50"] >= 30
    assert result["receive_lag_ms"]["count"] > 0
    assert 0 < result["client_cpu"]["mean"] <= result["client_cpu"]["busiest"]
    spans = [json.loads(line) for line in (tmp_path / "loadgen-traces.jsonl").read_text().splitlines()]
    assert {f"00-{span['trace_id']}-{span['span_id']}-01" for span in spans} == {r["traceparent"] for r in seen}


def test_a_server_without_token_ids_is_counted_by_its_usage(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--no-token-ids", "--tokens-per-chunk", "2", "--gap-s", "0.01")
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", "-u", "1", "-t", "1", "--json-out", "out.json", *VOCABULARY)
    assert well(ran.returncode), ran.stdout + ran.stderr
    result = summary(tmp_path / "out.json")
    completed = result["requests"]["completed"]
    assert result["itl_ms"]["count"] == 2 * completed
    assert 5 * completed <= result["tokens"]["output"] <= 5 * (completed + 1)


def test_http_errors_are_classed(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    classes = {429: "queue_full", 503: "transport", 400: "request", 500: "server", 504: "deadline"}
    stub = start_stub("--fail-every", "2", "--fail-with", *map(str, classes))
    settings = ["-u", "4", "-t", "2", "--stop-timeout", "10", "--json-out", "out.json", *VOCABULARY]
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", *settings)
    assert ran.returncode == 1
    result, outcomes = summary(tmp_path / "out.json"), Counter(request["outcome"] for request in stub.stop())
    assert result["errors"] == {kind: {"count": outcomes[code], "example": f"HTTP {code}: as scripted"} for code, kind in classes.items()}
    assert result["requests"]["completed"] == outcomes["finished"]
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("options", "kind", "example"),
    [
        (["--first-token-s", "0.8"], "deadline", "DEADLINE_EXCEEDED: longer than 0.4 s"),
        (["--error-in-stream"], "server", "HTTP 500: as scripted"),
        (["--no-usage"], "server", "PROTOCOL: the stream ended without [DONE]"),
        (["--usage-error", "1"], "server", "PROTOCOL: 5 token ids received, but usage.completion_tokens is 6"),
        (["--no-token-ids", "--usage-error", "1"], "server", "PROTOCOL: 6 tokens received, but 5 were asked for"),
    ],
)
def test_answers_that_fail_in_other_ways(
    start_stub: Callable[..., Stub], tmp_path: Path, options: list[str], kind: str, example: str
) -> None:
    stub = start_stub(*options)
    settings = ["-u", "2", "-t", "1", "--json-out", "out.json", "--set", "loadtest.timeout_s=0.4", *VOCABULARY]
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", *settings)
    assert ran.returncode == 1
    errors = summary(tmp_path / "out.json")["errors"]
    assert list(errors) == [kind]
    assert errors[kind]["example"] == example
    assert "Traceback" not in ran.stderr


def test_streams_in_the_middle_are_cut_off_and_are_no_failures(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--gap-s", "20")
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", "-u", "3", "-t", "1", "--json-out", "out.json", *VOCABULARY)
    assert well(ran.returncode), ran.stderr
    result = summary(tmp_path / "out.json")
    assert {key: result["requests"][key] for key in ("completed", "failed", "cut_off")} == {"completed": 0, "failed": 0, "cut_off": 3}
    assert (result["tokens"]["input"], result["tokens"]["output"]) == (48, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "loadtest.workload.vocab_size: the target of stub does not tell its vocabulary's size, so set it here"),
        ([*VOCABULARY, "--set", "loadtest.workload.input_tokens=5000"], "is 5005, but stub has a context of 4096"),
    ],
)
def test_what_the_target_cannot_do_is_found_before_the_first_request(
    start_stub: Callable[..., Stub], tmp_path: Path, options: list[str], message: str
) -> None:
    stub = start_stub()
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", "-t", "30", *options)
    assert ran.returncode == 1
    assert message in ran.stderr
    assert stub.stop() == []


def test_the_window_opens_after_the_warm_up_and_ends_after_enough_requests(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.05")
    settings = ["loadtest.warmup_requests=8", "loadtest.requests=12", "loadtest.duration_s=50"]
    options = ["-u", "2", "--json-out", "out.json", *VOCABULARY, *(word for setting in settings for word in ("--set", setting))]
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", *options)
    assert well(ran.returncode), ran.stdout + ran.stderr
    result, sent = summary(tmp_path / "out.json"), len(stub.stop())
    assert result["requests"]["completed"] >= 12
    assert result["requests"]["completed"] + result["requests"]["cut_off"] <= sent - 14
    # Those sent in the warm-up are completed in the window, but their latencies are not its own.
    assert result["requests"]["completed"] - 2 <= result["ttft_ms"]["count"] <= result["requests"]["completed"]


def test_a_run_that_ends_in_its_warm_up_measures_nothing(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.1")
    options = ["-u", "1", "-t", "1", "--json-out", "out.json", "--set", "loadtest.warmup_requests=1000", *VOCABULARY]
    ran = locust(tmp_path, "--target", f"openai://{stub.address}", *options)
    assert "the run ended in its warm-up: nothing was measured" in ran.stderr
    assert summary(tmp_path / "out.json")["requests"]["completed"] == 0
