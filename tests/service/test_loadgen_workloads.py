"""Workloads as they arrive at a server: the same prompts whatever the number of processes, conversations, and peers under gevent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from inference_service.config import Telemetry, load_config
from inference_service.telemetry.tracing import Tracing
from loadgen._target import Message, Model, Observation, Request
from loadgen._targets import make_target
from loadgen._workload import Workload
from tests.service._stub_server import EOS, VOCAB_SIZE
from tests.service.conftest import RunningServer
from tests.service.test_loadgen import Stub, locust, start_stub, summary, well
from tests.service.test_loadgen_peers_grpc import ANSWER, Service, start

__all__ = ["start", "start_stub"]  # fixtures

LENGTHS = ["loadtest.workload.input_tokens={min: 4, max: 12}", "loadtest.workload.prefix_share=0.5"]


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_two_processes_send_the_very_prompts_that_one_would(start_stub: Callable[..., Stub], tmp_path: Path) -> None:
    stub = start_stub("--gap-s", "0.02")
    ran = locust(tmp_path, "--target", stub.target, "--processes", "2", "-u", "4", "-t", "3", "--stop-timeout", "10", *options(*LENGTHS))
    assert well(ran.returncode), ran.stdout + ran.stderr
    seen = [tuple(request["token_ids"]) for request in stub.stop()["requests"]]
    config = load_config(overrides=["loadtest.workload.output_tokens=5", *LENGTHS])
    alone = Workload(config, Model("stub", VOCAB_SIZE, 4096, frozenset({EOS})))
    numbers = {tuple(alone.request(number).token_ids): number for number in range(2 * len(seen))}
    sent = sorted(numbers[prompt] for prompt in seen)
    # Each process has its own numbers, from the first on, without a gap.
    for process in range(2):
        own = [number for number in sent if number % 2 == process]
        assert own == list(range(process, process + 2 * len(own), 2))
        assert len(own) > 3


def test_a_peers_grpc_server_is_driven_through_whole_conversations(start: Callable[[str], tuple[Service, str]], tmp_path: Path) -> None:
    service, target = start("sglang")
    lines = [{"token_ids": [number] * 3, "output_tokens": 4} for number in range(5, 30)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    talk = ["loadtest.workload.input_tokens=3", "loadtest.workload.output_tokens=4", "loadtest.workload.turns=3"]
    ran = locust(tmp_path, "--target", target, "-u", "1", "-t", "2", "--stop-timeout", "10", "--json-out", "out.json", *options(*talk))
    assert well(ran.returncode), ran.stdout + ran.stderr
    result, prompts = summary(tmp_path / "out.json"), [list(request.tokenized.input_ids) for request in service.requests]
    assert result["requests"]["completed"] == len(prompts) > 3
    assert [len(prompt) for prompt in prompts[:4]] == [3, 10, 17, 3]
    assert prompts[1][:7] == [*prompts[0], *ANSWER]
    assert prompts[2][:14] == [*prompts[1], *ANSWER]

    service.requests.clear()
    file = ["loadtest.workload.file=prompts.jsonl", "loadtest.requests=10"]
    ran = locust(tmp_path, "--target", target, "-u", "1", "-t", "20", "--json-out", "out.json", *options(*file))
    assert well(ran.returncode), ran.stdout + ran.stderr
    sent = [request.tokenized.input_ids[0] for request in service.requests]
    assert len(set(sent)) == min(len(sent), 25) >= 10
    assert set(sent) <= set(range(5, 30))


def test_our_service_takes_each_form_of_a_prompt(echo_server: RunningServer) -> None:
    input_tokens = {}
    said = Message("user", "Why is the sky blue?")
    for path, request in {
        "": Request(output_tokens=4, token_ids=[500, 600, 700]),
        "/": Request(output_tokens=4, text=said.content),
        "/chat": Request(output_tokens=4, messages=(said,)),
    }.items():
        target = make_target(f"grpc://{echo_server.address}{path}", 20.0, Tracing(Telemetry(traces=False), "test"))
        observation = Observation()
        target.generate(request, observation)
        target.close()
        assert observation.failure is None
        assert len(observation.answer_ids) == 4
        assert "".join(observation.answer_text)
        input_tokens[path] = observation.input_tokens
    assert input_tokens[""] == 3
    assert 3 < input_tokens["/"] < input_tokens["/chat"]
