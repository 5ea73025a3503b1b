"""The load generator as its users run it: real `locust` processes against a gRPC server with scripted delays and errors."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen._result import Result, read_result
from loadgen._verdict import UNTRUSTED

ROOT = Path(__file__).resolve().parents[2]
STUB = Path(__file__).with_name("_stub_server.py")
TIMEOUT_S = 60


class Stub:
    """The scripted server, in a process of its own."""

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen([sys.executable, str(STUB), *options], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        assert ready.startswith("ready on "), ready
        self.target = f"grpc://{ready.removeprefix('ready on ').strip()}"

    def stop(self) -> dict[str, Any]:
        """End it; what it has seen: peak concurrency, and each request with its outcome."""
        self._process.terminate()
        output, _ = self._process.communicate(timeout=TIMEOUT_S)
        seen = json.loads(output)
        assert isinstance(seen, dict)
        return seen

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


def command(*options: str, directory: str = str(ROOT / "loadgen")) -> list[str]:
    lengths = ["--set", "loadtest.workload.input_tokens=16", "--set", "loadtest.workload.output_tokens=5"]
    if "--processes" in options:
        # Not Locust's fixed port: another test may run.
        lengths += ["--master-bind-port", port := str(free_port()), "--master-port", port]
    return [sys.executable, "-m", "locust", "-f", directory, "--only-summary", *lengths, *options]


def locust(cwd: Path, *options: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("--headless", *options, **kwargs), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S)


def result_of(path: Path) -> Result:
    return read_result(path)


def summary(path: Path) -> dict[str, Any]:
    """The only level of a run."""
    (level,) = json.loads(path.read_text())["levels"]
    assert isinstance(level, dict)
    return level


def well(status: int | None) -> bool:
    """Whether a run ended without failures; on a busy machine the load generator may say that it is not to be trusted."""
    return status in (0, UNTRUSTED)


def locusts_own_count(ran: subprocess.CompletedProcess[str]) -> int:
    """Requests in Locust's own table."""
    found = re.search(r"Aggregated +(\d+) +0\(0\.00%\)", ran.stdout + ran.stderr)
    assert found, ran.stdout + ran.stderr
    return int(found[1])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_from_the_root_with_everything_from_the_yaml(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.02", "--gap-s", "0.01", "--tokens-per-delta", "2")
    config = tmp_path / "experiment.yaml"
    config.write_text(
        f"loadtest:\n  target: {stub.target}\n  concurrency: [3]\n  duration_s: 2\n  timeout_s: 30\n"
        f"  trace_file: {tmp_path}/spans.jsonl\n  json_file: {tmp_path}/new/summary.json\n"
    )
    # Requests in flight at the end may finish, so nothing is cut off, and every count must agree with the server's.
    ran = locust(ROOT, "--loadgen-config", str(config), directory="loadgen")
    assert well(ran.returncode), ran.stderr
    assert ran.stdout.count("TTFT") == 1
    result, seen = summary(tmp_path / "new" / "summary.json"), stub.stop()

    sent = len(seen["requests"])
    assert sent > 3
    assert seen["peak"] == result["concurrency"] == 3
    for request in seen["requests"]:
        assert (len(request["token_ids"]), request["max_tokens"], request["ignore_eos"], request["outcome"]) == (16, 5, True, "finished")
        assert 0 < request["deadline_s"] < 31
    assert len({tuple(request["token_ids"]) for request in seen["requests"]}) == sent

    assert {key: result["requests"][key] for key in ("completed", "failed", "cut_off")} == {"completed": sent, "failed": 0, "cut_off": 0}
    # What came while the three last ones drained is not of the window, nor are their ends.
    assert 16 * (sent - 3) <= result["tokens"]["input"] <= 16 * sent
    assert 5 * (sent - 3) <= result["tokens"]["output"] <= 5 * sent
    assert sent - 3 <= round(result["requests"]["completed_per_s"] * result["duration_s"]) <= sent
    assert result["tokens"]["output_per_s"] == pytest.approx(result["tokens"]["output"] / result["duration_s"])
    # The answers of 5 tokens came in 3 messages of 2, 2 and 1 tokens; an empty one before them counts for nothing.
    assert result["itl_ms"]["count"] == 2 * sent
    assert result["ttft_ms"]["count"] == result["tpot_ms"]["count"] == result["e2e_ms"]["count"] == sent
    assert result["ttft_ms"]["p50"] >= 20
    assert result["tpot_ms"]["p50"] >= 5
    assert 2 <= result["mean_in_flight"] <= 3.01
    assert locusts_own_count(ran) == sent

    spans = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    assert len(spans) == sent
    assert {f"00-{span['trace_id']}-{span['span_id']}-01" for span in spans} == {r["traceparent"] for r in seen["requests"]}
    for span in spans:
        assert (span["kind"], span["attributes"]["rpc.response.status_code"]) == ("CLIENT", "OK")
        assert span["attributes"]["gen_ai.latency.time_to_first_token"] >= 0.02


def test_processes_are_merged_exactly(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.03", "--gap-s", "0.005")
    options = ["-u", "5", "-t", "2", "--processes", "2", "--stop-timeout", "10", "--json-out", "out.json"]
    ran = locust(tmp_path, "--target", stub.target, *options)
    assert well(ran.returncode), ran.stderr
    assert ran.stdout.count("TTFT") == 1
    result, seen = summary(tmp_path / "out.json"), stub.stop()
    sent = len(seen["requests"])
    assert seen["peak"] == result["concurrency"] == 5
    assert sent == result["requests"]["completed"] == result["ttft_ms"]["count"] == locusts_own_count(ran)
    assert result["itl_ms"]["count"] == 4 * sent
    assert result["tokens"]["output"] == 5 * sent
    # Processes send different prompts, and write their spans into one file.
    assert len({tuple(r["token_ids"]) for r in seen["requests"]}) == sent
    assert len((tmp_path / "loadgen-traces.jsonl").read_text().splitlines()) == sent


def test_a_worker_gets_its_settings_from_the_master(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub, port = start_stub("--first-token-s", "0.03"), str(free_port())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "experiment.yaml").write_text("loadtest:\n  concurrency: [2]\n  duration_s: 1\n  seed: 7\n")
    worker = subprocess.Popen(command("--worker", "--master-port", port), cwd=elsewhere, stderr=subprocess.DEVNULL)
    options = ["--master", "--master-bind-port", port, "--expect-workers", "1", "--stop-timeout", "10", "--json-out", "out.json"]
    ran = locust(tmp_path, "--target", stub.target, "--loadgen-config", "experiment.yaml", *options)
    assert well(ran.returncode) and worker.wait(TIMEOUT_S) == 0, ran.stderr
    result, seen = summary(tmp_path / "out.json"), stub.stop()
    run = result_of(tmp_path / "out.json")
    assert (result["concurrency"], run.loadtest["seed"], run.target, run.model) == (2, 7, stub.target, "stub")
    assert result["requests"]["completed"] == len(seen["requests"]) > 0
    assert all(len(request["token_ids"]) == 16 for request in seen["requests"])


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_control_c_ends_a_run_with_its_summary(start_stub: Callable[..., Stub], tmp_path: Path, processes: list[str]) -> None:
    stub = start_stub("--first-token-s", "0.05")
    options = ["--headless", "--target", stub.target, "-u", "2", "-t", "60", "--json-out", "out.json", *processes]
    run = subprocess.Popen(
        command(*options), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_for(lambda: (tmp_path / "loadgen-traces.jsonl").exists())
    os.killpg(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=TIMEOUT_S)
    assert well(run.returncode), output
    counts, sent = summary(tmp_path / "out.json")["requests"], len(stub.stop()["requests"])
    assert counts["completed"] > 0
    assert counts["failed"] == 0
    assert counts["completed"] <= sent <= counts["completed"] + counts["cut_off"]


def test_two_runs_send_the_same_prompts(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    prompts = []
    for _ in range(2):
        stub = start_stub("--first-token-s", "0.2")
        assert well(locust(tmp_path, "--target", stub.target, "-u", "1", "-t", "1").returncode)
        prompts.append([r["token_ids"] for r in stub.stop()["requests"]])
    shared = min(map(len, prompts))
    assert shared > 1
    assert prompts[0][:shared] == prompts[1][:shared]


def test_error_codes_are_classed_and_fail_the_run(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    classes = {
        "RESOURCE_EXHAUSTED": "queue_full",
        "CANCELLED": "cancelled",
        "UNAVAILABLE": "transport",
        "INTERNAL": "server",
        "INVALID_ARGUMENT": "request",
    }
    stub = start_stub("--fail-every", "2", "--fail-with", *classes)
    ran = locust(tmp_path, "--target", stub.target, "-u", "4", "-t", "2", "--stop-timeout", "10", "--json-out", "out.json")
    assert ran.returncode == 1
    result, outcomes = summary(tmp_path / "out.json"), Counter(request["outcome"] for request in stub.stop()["requests"])
    assert result["errors"] == {kind: {"count": outcomes[code], "example": f"{code}: as scripted"} for code, kind in classes.items()}
    assert all(f"  {kind}: " in ran.stdout for kind in classes.values())
    assert result["requests"]["completed"] == outcomes["finished"] == result["e2e_ms"]["count"]
    assert result["requests"]["failed"] == outcomes.total() - outcomes["finished"]
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("options", "kind", "example"),
    [
        (["--first-token-s", "0.8"], "deadline", "DEADLINE_EXCEEDED: "),
        (["--no-finish"], "server", "PROTOCOL: the stream ended without Finished"),
        (["--usage-error", "1"], "server", "PROTOCOL: 5 token ids received, but usage.completion_tokens is 6"),
    ],
)
def test_answers_that_fail_in_other_ways(
    start_stub: Callable[..., Stub], tmp_path: Path, options: list[str], kind: str, example: str
) -> None:
    stub = start_stub(*options)
    settings = ["-u", "2", "-t", "1", "--json-out", "out.json", "--set", "loadtest.timeout_s=0.4"]
    ran = locust(tmp_path, "--target", stub.target, *settings)
    assert ran.returncode == 1
    result = summary(tmp_path / "out.json")
    assert list(result["errors"]) == [kind]
    assert result["errors"][kind]["example"].startswith(example)
    assert result["errors"][kind]["count"] == result["requests"]["failed"] > 0
    assert result["requests"]["completed"] == result["e2e_ms"]["count"] == 0
    assert "Traceback" not in ran.stderr


def test_streams_in_the_middle_are_cut_off_and_are_no_failures(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--gap-s", "20")
    ran = locust(tmp_path, "--target", stub.target, "-u", "3", "-t", "1", "--json-out", "out.json")
    assert well(ran.returncode), ran.stderr
    result = summary(tmp_path / "out.json")
    assert result["requests"] == {"completed": 0, "failed": 0, "cut_off": 3, "good": 0, "completed_per_s": 0.0, "good_per_s": 0.0}
    assert (result["tokens"]["input"], result["tokens"]["output"]) == (48, 3)
    assert result["ttft_ms"]["p50"] is None


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_a_server_that_is_absent_is_named_once(tmp_path: Path, processes: list[str]) -> None:
    target = f"grpc://127.0.0.1:{free_port()}"
    ran = locust(tmp_path, "--target", target, "-u", "4", "-t", "30", "--json-out", "out.json", *processes)
    assert ran.returncode == 1
    assert ran.stderr.count(f"target {target} does not answer: UNAVAILABLE") == 1
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out.json").exists()


def test_a_server_that_dies_in_the_run_is_not_hammered(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--first-token-s", "0.05")
    options = ["--headless", "--target", stub.target, "-u", "2", "-t", "6", "--json-out", "out.json"]
    run = subprocess.Popen(command(*options), cwd=tmp_path, stderr=subprocess.PIPE)
    wait_for(lambda: (tmp_path / "loadgen-traces.jsonl").exists())
    stub.kill()
    _, errors = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 1
    assert b"Traceback" not in errors
    result = summary(tmp_path / "out.json")
    assert list(result["errors"]) == ["transport"]
    assert 0 < result["requests"]["failed"] <= 2 * 10 * result["duration_s"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "loadtest.workload.input_tokens=0"], "loadgen: configuration: loadtest.workload.input_tokens: Expected `int` >= 1"),
        (["--loadgen-config", "absent.yaml"], "loadgen: absent.yaml: No such file or directory"),
        (["--json-out", "."], "loadgen: .: a folder, but the result is a file"),
        (["--target", "http://127.0.0.1:1"], "target 'http://127.0.0.1:1': write grpc://HOST:PORT"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, options: list[str], message: str) -> None:
    ran = locust(tmp_path, "-t", "30", *options)
    assert ran.returncode == 1
    assert message in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("option", ["--json-out", "--html-out", "--requests-out"])
def test_a_file_that_cannot_be_written_fails_the_run(start_stub: Callable[..., Stub], tmp_path: Path, option: str) -> None:
    ran = locust(tmp_path, "--target", start_stub("--first-token-s", "0.05").target, "-t", "1", option, "/dev/full")
    assert ran.returncode in (1, UNTRUSTED)
    assert "cannot write /dev/full: No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_prompts_beyond_the_context_are_refused_before_the_first(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub()
    ran = locust(tmp_path, "--target", stub.target, "-t", "30", "--set", "loadtest.workload.input_tokens=5000")
    assert ran.returncode == 1
    assert "input_tokens + output_tokens is 5005, but stub has a context of 4096" in ran.stderr
    assert stub.stop()["requests"] == []


@pytest.mark.parametrize("processes", [[], ["--processes", "2"]])
def test_web_ui(start_stub: Callable[..., Stub], tmp_path: Path, processes: list[str]) -> None:
    stub = start_stub("--first-token-s", "0.02")
    port = free_port()
    options = ["--target", stub.target, "--web-host", "127.0.0.1", "--web-port", str(port), "--json-out", "out.json"]
    ui = subprocess.Popen(command(*options, *processes), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        workers = len(processes)
        page = wait_for(lambda: fetch(port, "/"), lambda page: f'"worker_count": {workers}' in page or not workers)
        assert stub.target in page
        assert "Tokens" in page
        assert json.loads(fetch(port, "/swarm", user_count="2", spawn_rate="2", host=stub.target))["success"]
        wait_for(lambda: rows(port), lambda rows: rows and rows["TTFT (ms)"]["count"] > 0)
        fetch(port, "/stats/reset")
        after_reset = wait_for(lambda: rows(port), lambda rows: rows and rows["TTFT (ms)"]["count"] > 0)
        assert after_reset["TTFT (ms)"]["p50"] >= 20
        fetch(port, "/stop")
        result = wait_for(lambda: summary(tmp_path / "out.json") if (tmp_path / "out.json").exists() else None)
        assert result["concurrency"] == 2
    finally:
        os.kill(ui.pid, signal.SIGTERM)
        output, _ = ui.communicate(timeout=TIMEOUT_S)
    assert ui.returncode == 0, output
    assert output.count("TTFT") == 1
    assert "Traceback" not in output
    # What came before the reset is not in the summary.
    assert result["requests"]["completed"] + result["requests"]["cut_off"] < len(stub.stop()["requests"])


def fetch(port: int, path: str, **form: str) -> str:
    post = urllib.parse.urlencode(form).encode() if form or path in ("/stop", "/stats/reset") else None
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data=post, timeout=10) as response:
        body = response.read()
        assert isinstance(body, bytes)
        return body.decode()


def rows(port: int) -> dict[str, Any]:
    """The tab's rows, by the name in their first column."""
    tokens, _ = json.loads(fetch(port, "/stats/requests"))["extended_stats"]
    return {row["name"]: row for row in tokens["data"]}


def wait_for(ask: Callable[[], Any], good: Callable[[Any], bool] = bool) -> Any:
    """What `ask` returns once it is good; connection errors mean not yet."""
    deadline = time.monotonic() + 30
    while True:
        try:
            if good(answer := ask()):
                return answer
        except OSError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
