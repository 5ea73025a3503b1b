"""Several choices of one request, priorities and salts over gRPC, against real servers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference.v1 import generate_pb2 as pb
from inference.v1 import info_pb2
from inference_service.client import AioClient, Client, InferenceError
from inference_service.models.synthetic_tokenizer import write_tokenizer
from inference_service.rpc.forks import choice_seed
from tests.service.conftest import RunningServer, run_server

SLOTS, QUEUE = 4, 4
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model of random weights: its answers depend on the draws."""
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(TINY))
    write_tokenizer(model)
    settings = [f"model.path={model}", "model.load_format=dummy", "device.kind=cpu", "device.threads=1", "cache.pages=300"]
    with run_server(tmp_path_factory.mktemp("dummy"), *settings, f"batch.max_requests={SLOTS}", f"server.max_queue={QUEUE}") as server:
        yield server


@pytest.fixture(scope="module")
def slow_echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ["model.load_format=echo", "model.echo_step_ms=5", f"batch.max_requests={SLOTS}", f"server.max_queue={QUEUE}"]
    with run_server(tmp_path_factory.mktemp("echo"), *settings) as server:
        yield server


def wait_until_idle(client: Client) -> info_pb2.GetLoadResponse:
    """Nothing runs or waits, and no page is held."""
    deadline = time.monotonic() + 30
    while (load := client.load()).running or load.waiting or load.pages_used:
        assert time.monotonic() < deadline, load
        time.sleep(0.02)
    return load


def test_choices_are_the_answers_to_requests_with_their_seeds(drawing: RunningServer) -> None:
    with Client(drawing.address) as client:
        fields: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "timeout": 60}
        choices = client.generate_choices("a prompt of some length", n=6, seed=11, **fields)
        single = [client.generate_text("a prompt of some length", seed=choice_seed(11, choice), **fields) for choice in range(6)]
        assert [choice.token_ids for choice in choices] == [answer.token_ids for answer in single]
        assert [choice.text for choice in choices] == [answer.text for answer in single]
        assert len({tuple(choice.token_ids) for choice in choices}) == 6
        assert all(choice.seed == 11 and choice.usage.completion_tokens == 12 for choice in choices)
        greedy = client.generate_choices("a prompt", n=3, **{**fields, "temperature": 0.0})
        assert len({tuple(choice.token_ids) for choice in greedy}) == 1
        wait_until_idle(client)


def test_one_stream_carries_all_and_a_stop_string_ends_one(drawing: RunningServer) -> None:
    with Client(drawing.address) as client:
        fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True, "timeout": 60}
        whole = client.generate_choices("stop", n=3, max_tokens=40, **fields)
        # What the second says, and no other.
        words = [client.detokenize([token_id]) for token_id in whole[1].token_ids[5:30] if token_id >= 1000]
        stop = next(word for word in words if word not in whole[0].text + whole[2].text)
        events = list(client.generate("stop", n=3, max_tokens=40, stop=[stop], logprobs=0, request_id="three", **fields))
        assert [event.WhichOneof("event") for event in events].count("accepted") == 1 and events[0].accepted.request_id == "three"
        finished = {event.finished.index: event.finished for event in events if event.HasField("finished")}
        assert sorted(finished) == [0, 1, 2]
        for index, answer in enumerate(whole):
            deltas = [event.delta for event in events if event.HasField("delta") and event.delta.index == index]
            text = "".join(delta.text for delta in deltas)
            ids = [token_id for delta in deltas for token_id in delta.token_ids]
            end = finished[index]
            assert ids == answer.token_ids[: len(ids)] and sum(len(delta.logprobs) for delta in deltas) == len(ids)
            if index == 1:
                assert (end.reason, end.stop_string, text) == (pb.FINISH_REASON_STOP, stop, answer.text[: answer.text.index(stop)])
            else:
                assert (end.reason, text, len(ids)) == (pb.FINISH_REASON_LENGTH, answer.text, 40)
                assert end.usage.completion_tokens == 40
            last = max(place for place, event in enumerate(events) if event.HasField("delta") and event.delta.index == index)
            assert last < next(place for place, event in enumerate(events) if event.HasField("finished") and event.finished.index == index)
        wait_until_idle(client)


def test_an_abort_ends_every_choice_that_goes_on(slow_echo: RunningServer) -> None:
    with Client(slow_echo.address) as client:
        events = client.generate([500], n=3, request_id="aborted", ignore_eos=True, timeout=60)
        seen = [next(events) for _ in range(10)]
        assert client.abort("aborted")
        seen += events
        finished = [event.finished for event in seen if event.HasField("finished")]
        assert sorted(end.index for end in finished) == [0, 1, 2]
        assert {end.reason for end in finished} == {pb.FINISH_REASON_ABORTED}
        wait_until_idle(client)


def test_a_client_that_cancels_leaves_nothing(slow_echo: RunningServer) -> None:
    with Client(slow_echo.address) as client:
        for taken in (1, 2, 9):  # while the others still wait for the first, as they begin, and later
            events = client.generate(list(range(600, 640)), n=SLOTS + 2, ignore_eos=True, timeout=60)
            for _ in range(taken):
                next(events)
            events.close()  # type: ignore[attr-defined]
            wait_until_idle(client)


def test_a_deadline_ends_all(slow_echo: RunningServer) -> None:
    with Client(slow_echo.address) as client:
        with pytest.raises(InferenceError) as caught:
            client.generate_choices([700], n=SLOTS + 1, ignore_eos=True, timeout=0.3)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until_idle(client)


async def test_each_choice_counts_towards_the_limit(slow_echo: RunningServer) -> None:
    async with AioClient(slow_echo.address) as client:
        events = client.generate([800], n=6, max_tokens=300, timeout=60)
        await anext(events)
        for n, code in ((3, grpc.StatusCode.RESOURCE_EXHAUSTED), (SLOTS + QUEUE + 1, grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(InferenceError) as caught:
                await client.generate_choices([900], n=n, max_tokens=1, timeout=30)
            assert caught.value.code is code
        assert len(await client.generate_choices([900], n=2, max_tokens=1, timeout=30)) == 2
        await events.aclose()  # type: ignore[attr-defined]
        answers = await client.generate_choices([800], n=SLOTS + QUEUE, max_tokens=3, timeout=30)
        assert [answer.token_ids for answer in answers] == [[801, 802, 803]] * (SLOTS + QUEUE)


async def test_the_urgent_go_first(slow_echo: RunningServer) -> None:
    """All slots are taken; of those that wait, the one with the largest priority is scheduled first."""
    async with AioClient(slow_echo.address) as client:
        running = [asyncio.create_task(client.generate_text([1000 + slot], max_tokens=200, timeout=60)) for slot in range(SLOTS)]
        while (await client.load()).running < SLOTS:
            assert not any(task.done() for task in running)
            await asyncio.sleep(0.01)
        waiting = []
        for priority in (0, -5, 7):
            waiting.append(asyncio.create_task(client.generate_text([5], max_tokens=100, priority=priority, timeout=60)))
            await asyncio.sleep(0.01)
        answers = await asyncio.gather(*waiting)
        await asyncio.gather(*running)
        normal, late, urgent = (answer.timings.scheduled_unix_ns for answer in answers)
        assert urgent <= normal <= late


def test_salts_keep_prefixes_apart(slow_echo: RunningServer) -> None:
    with Client(slow_echo.address) as client:
        prompt = list(range(4000, 4040))
        cached = [
            client.generate_text(prompt, max_tokens=1, cache_salt=salt, timeout=30).usage.cached_tokens
            for salt in ("", "a", "b", "a", "", "ü" * 128)
        ]
        assert cached == [0, 0, 0, 32, 32, 0]
        choices = client.generate_choices(prompt, n=3, max_tokens=1, cache_salt="b", timeout=30)
        assert [choice.usage.cached_tokens for choice in choices] == [32] * 3


def test_the_command_line_prints_every_choice(drawing: RunningServer) -> None:
    command = [sys.executable, "-m", "inference_service.cli", "generate", "--raw", "--target", drawing.address, "--max-tokens", "5"]
    output = subprocess.run([*command, "--n", "2", "hello"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert sorted(line for line in output.splitlines() if line.startswith("--- ")) == ["--- choice 0 ---", "--- choice 1 ---"]


def test_one_trace_tells_of_all_choices(tmp_path: Path) -> None:
    with run_server(tmp_path, "model.load_format=echo") as server:
        with Client(server.address) as client:
            client.generate_choices([500], n=3, max_tokens=4, timeout=30)
        assert server.stop() == 0
        spans = [json.loads(line) for line in server.traces.read_text().splitlines()]
    (attributes,) = [span["attributes"] for span in spans if span["kind"] == "SERVER"]
    assert attributes["gen_ai.request.choice.count"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 12 and attributes["gen_ai.usage.input_tokens"] == 1
    assert attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
