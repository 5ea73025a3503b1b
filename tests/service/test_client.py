"""The Python client against a real server: the same calls for threads and for asyncio."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference.v1 import generate_pb2
from inference_service.client import AioClient, Client, InferenceError
from tests.service.conftest import RunningServer, run_server

CHAT = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(echo_server: RunningServer) -> Iterator[Client]:
    with Client(f"grpc://{echo_server.address}") as client:
        yield client


@pytest.fixture
async def aio_client(echo_server: RunningServer) -> AsyncIterator[AioClient]:
    async with AioClient(echo_server.address) as client:
        yield client


def test_events_and_completion_say_the_same(client: Client) -> None:
    events = list(client.generate([500], max_tokens=5, seed=3, logprobs=None, request_id="mine", timeout=30))
    assert events[0].accepted.request_id == "mine"
    assert events[-1].finished.reason == generate_pb2.FINISH_REASON_LENGTH
    ids = [token_id for event in events for token_id in event.delta.token_ids]
    completion = client.generate_text([500], max_tokens=5, seed=3, timeout=30)
    assert completion.token_ids == ids == [501, 502, 503, 504, 505]
    assert completion.text == "".join(event.delta.text for event in events) == client.detokenize(ids)
    assert (completion.seed, completion.finish_reason, completion.matched_stop) == (3, "length", None)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (1, 5)
    assert len(completion.token_times_unix_ns) == 5
    assert completion.timings.last_token_unix_ns == completion.token_times_unix_ns[-1]


def test_what_stopped_it(client: Client) -> None:
    stopped = client.generate_text([500], max_tokens=50, stop_token_ids=[503], timeout=30)
    assert (stopped.finish_reason, stopped.matched_stop, stopped.token_ids) == ("stop", 503, [501, 502])
    text = client.detokenize([501, 502, 503, 504])
    stop = client.detokenize([503])
    stopped = client.generate_text([500], max_tokens=50, stop=stop, timeout=30)
    assert (stopped.finish_reason, stopped.matched_stop) == ("stop", stop)
    assert stopped.text == text[: text.index(stop)]


def test_prompts_of_every_kind(client: Client) -> None:
    ids = client.tokenize("Hello")
    assert client.generate_text("Hello", max_tokens=1, timeout=30).usage.prompt_tokens == len(ids)
    chat = client.tokenize(CHAT)
    assert len(chat) > len(ids)
    assert len(client.tokenize(CHAT, add_generation_prompt=False)) < len(chat)
    assert client.generate_text(CHAT, max_tokens=1, timeout=30).usage.prompt_tokens == len(chat)


def test_abort_and_cancel(client: Client) -> None:
    assert not client.abort("nobody")
    for _ in range(50):  # the echo engine is quick: an answer may end before the abort reaches it
        events = client.generate([500], request_id="aborted", ignore_eos=True, timeout=60)
        assert next(events).HasField("accepted")
        client.abort("aborted")
        reason = list(events)[-1].finished.reason
        if reason == generate_pb2.FINISH_REASON_ABORTED:
            break
    assert reason == generate_pb2.FINISH_REASON_ABORTED
    events = client.generate([600], request_id="cancelled", ignore_eos=True, timeout=60)
    next(events)
    events.close()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while client.load().running:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_infos(client: Client) -> None:
    client.wait_ready(30)
    assert client.model_info().has_chat_template
    info = client.server_info()
    assert info.limits.max_requests == 8 and info.compiles_since_ready == 0
    assert client.load().pages_total > 0


def test_errors_carry_the_details(client: Client) -> None:
    with pytest.raises(InferenceError) as caught:
        client.generate_text("Hello", temperature=-1.0)
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason
    ((field, description),) = error.field_violations
    assert field.endswith("temperature")
    assert description in str(error)
    assert error.retry_delay_s is None
    with pytest.raises(InferenceError) as caught:
        client.generate_text([500], timeout=0.0)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_arguments_are_the_fields_of_the_api(client: Client) -> None:
    wrong: list[tuple[str, Any]] = [("max_token", 3), ("sampling", {}), ("text", "x"), ("add_generation_prompt", True)]
    for name, value in wrong:
        with pytest.raises(TypeError, match=name):
            client.generate("Hello", **{name: value})
    with pytest.raises(ValueError, match="top_k"):
        client.generate("Hello", top_k=-1)
    with pytest.raises(TypeError, match="temperature"):
        client.generate("Hello", temperature="hot")
    with pytest.raises(ValueError, match="contents"):
        client.generate([{"role": "user", "contents": "x"}])
    with pytest.raises(TypeError, match="prompt"):
        client.tokenize([1, 2])  # type: ignore[list-item]


async def test_asyncio_client(aio_client: AioClient) -> None:
    await aio_client.wait_ready(30)
    completion = await aio_client.generate_text([500], max_tokens=3, timeout=30)
    assert completion.token_ids == [501, 502, 503]
    assert await aio_client.detokenize([501, 502, 503]) == completion.text
    assert await aio_client.tokenize(CHAT) == await aio_client.tokenize(CHAT, add_generation_prompt=True)
    assert (await aio_client.model_info()).vocab_size > 503
    assert (await aio_client.server_info()).limits.page_size > 0
    assert not await aio_client.abort("nobody")
    both = await asyncio.gather(*(aio_client.generate_text([first], max_tokens=20, timeout=30) for first in (700, 800)))
    assert [completion.token_ids[0] for completion in both] == [701, 801]
    with pytest.raises(InferenceError) as caught:
        await aio_client.generate_text("Hello", top_p=2.0)
    assert caught.value.field_violations[0][0].endswith("top_p")
    events = aio_client.generate([600], ignore_eos=True, timeout=60)
    async for _ in events:
        break
    await events.aclose()  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30
    while (await aio_client.load()).running:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_traceparent_is_passed_on_and_drain_ends_the_server(tmp_path: Path) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with run_server(tmp_path, "model.load_format=echo") as server:
        with Client(server.address) as client:
            client.generate_text([500], max_tokens=2, timeout=30, traceparent=f"00-{trace_id}-b7ad6b7169203331-01")
            assert client.drain() == 0
        assert server.process.wait(60) == 0
        names = [span["name"] for span in map(json.loads, server.traces.read_text().splitlines()) if span["trace_id"] == trace_id]
    assert names == ["queue", "prefill", "decode", "inference.v1.InferenceService/Generate"]


def test_waiting_for_a_server_that_is_away() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InferenceError, match=r"not ready after 0\.3 s"):
        client.wait_ready(0.3)

    async def wait() -> None:
        async with AioClient("127.0.0.1:1") as client:
            await client.wait_ready(0.3)

    with pytest.raises(InferenceError, match="not ready"):
        asyncio.run(wait())
    with Client("127.0.0.1:1") as client, pytest.raises(InferenceError) as caught:
        client.generate_text("Hello", timeout=5)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_an_asyncio_stream_that_is_never_read_leaves_nothing_behind(aio_client: AioClient) -> None:
    stream = aio_client.generate([500], max_tokens=2000, ignore_eos=True)
    await asyncio.sleep(0.1)
    del stream
    await asyncio.sleep(0.1)
    assert (await aio_client.load()).running == 0


def test_text_that_is_no_unicode_names_its_field(client: Client) -> None:
    with pytest.raises(ValueError, match="text: "):
        client.generate_text("a\ud800")
    with pytest.raises(ValueError, match="stop: "):
        client.generate_text("a", stop=["\ud800"])
