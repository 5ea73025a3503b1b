"""Servers that are asked for more than they can do: engines paced to fixed steps, and clients that do not wait for each other."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from inference.v1 import generate_pb2 as pb
from inference.v1 import info_pb2
from inference.v1.inference_pb2_grpc import InferenceServiceStub
from inference_service.client import Client
from inference_service.client_messages import InferenceError
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import request

SLOTS, QUEUE = 2, 16
ANSWER = 20
PACED = ("model.load_format=echo", "model.echo_step_ms=5", f"batch.max_requests={SLOTS}", f"server.max_queue={QUEUE}")
RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "30s",
                "maxBackoff": "30s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
            },
        }
    ]
}
"""A client that tries again when the server says: by itself it would only after the test."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(tmp_path_factory.mktemp("overload"), *PACED) as server:
        yield server


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    limits = ("client_key=x-team", "client_streams=2", "client_tokens_per_min=1600", "max_queued_tokens=1000", "max_kv_share=0.5")
    settings = ("model.echo_step_ms=10", "cache.pages=700", *(f"limits.{limit}" for limit in limits))
    with run_server(tmp_path_factory.mktemp("limited"), *PACED, *settings) as server:
        yield server


class Ended:
    """How a request ended."""

    def __init__(self, code: grpc.StatusCode, text: str = "", trailers: Any = (), ids: tuple[int, ...] = (), first_ns: int = 0) -> None:
        self.code, self.text, self.ids, self.first_ns = code, text, ids, first_ns
        self.trailers = dict(trailers)

    def detail(self, kind: type[Message]) -> Any:
        status = status_pb2.Status.FromString(self.trailers.get("grpc-status-details-bin", b""))
        for packed in status.details:
            if packed.Is(kind.DESCRIPTOR):
                message = kind()
                packed.Unpack(message)
                return message
        return None

    @property
    def info(self) -> Any:
        return self.detail(error_details_pb2.ErrorInfo)


async def ask(stub: Any, made: pb.GenerateRequest, timeout: float | None = 30, **call: Any) -> Ended:
    ids: list[int] = []
    first_ns = 0
    try:
        async for event in stub.Generate(made, timeout=timeout, **call):
            ids += event.delta.token_ids
            first_ns = event.finished.timings.first_token_unix_ns or first_ns
    except grpc.aio.AioRpcError as error:
        return Ended(error.code(), error.details() or "", error.trailing_metadata())
    return Ended(grpc.StatusCode.OK, ids=tuple(ids), first_ns=first_ns)


def counting(start: int, length: int = ANSWER, **fields: Any) -> pb.GenerateRequest:
    return request([start], length, **fields)


@contextmanager
def busy(server: RunningServer, calls: int, made: pb.GenerateRequest, **call: Any) -> Iterator[list[Any]]:
    """So many calls in flight, for as long as the context lasts; those that end are followed by others."""
    stop = threading.Event()
    current: list[Any] = [None] * calls

    def keep(place: int, stub: InferenceServiceStub) -> None:
        while not stop.is_set():
            current[place] = stub.Generate(made, timeout=60, **call)
            try:
                for _ in current[place]:
                    pass
            except grpc.RpcError:
                time.sleep(0.02)

    with server.stub() as stub:
        threads = [threading.Thread(target=keep, args=(place, stub)) for place in range(calls)]
        for thread in threads:
            thread.start()
        try:
            yield current
        finally:
            stop.set()
            for each in current:
                if each is not None:
                    each.cancel()
            for thread in threads:
                thread.join(30)


def load(server: RunningServer) -> info_pb2.GetLoadResponse:
    with server.stub() as stub:
        answer: info_pb2.GetLoadResponse = stub.GetLoad(info_pb2.GetLoadRequest(), timeout=10)
    return answer


def until(server: RunningServer, condition: Any, seconds: float = 30) -> info_pb2.GetLoadResponse:
    deadline = time.monotonic() + seconds
    while not condition(now := load(server)):
        assert time.monotonic() < deadline, now
        time.sleep(0.02)
    return now


def assert_idle(server: RunningServer) -> None:
    until(server, lambda now: not (now.running or now.waiting or now.pages_used))
    now = load(server)
    assert (now.in_flight, now.pages_committed, now.waiting_prompt_tokens) == (0, 0, 0)


def error_of(server: RunningServer, made: pb.GenerateRequest, timeout: float = 30, **call: Any) -> Ended:
    async def once() -> Ended:
        async with grpc.aio.insecure_channel(server.address) as channel:
            return await ask(InferenceServiceStub(channel), made, timeout, **call)

    ended = asyncio.run(once())
    assert ended.code != grpc.StatusCode.OK
    return ended


def test_in_a_storm_every_request_ends_and_what_was_taken_is_answered(server: RunningServer) -> None:
    """Many times the sustainable load: no request is left without a status, refusals say why and when, and answers are whole."""

    async def storm() -> list[Ended]:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = InferenceServiceStub(channel)
            calls = []
            for number in range(400):
                timeout = (0.05, 1.0, 10.0, None)[number % 4]
                calls.append(asyncio.create_task(ask(stub, counting(1000 + 100 * number), timeout)))
                await asyncio.sleep(0.002)
            return await asyncio.gather(*calls)

    ended = asyncio.run(storm())
    codes = Counter(each.code for each in ended)
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert codes[grpc.StatusCode.OK] >= SLOTS + QUEUE / 4 and codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 100
    for number, each in enumerate(ended):
        if each.code == grpc.StatusCode.OK:
            start = 1000 + 100 * number
            assert each.ids == tuple(range(start + 1, start + 1 + ANSWER))
        if each.code == grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert each.info.reason == "QUEUE_FULL" and each.info.metadata["limit"] == str(SLOTS + QUEUE)
            assert 0 <= int(each.info.metadata["queue_position"]) <= SLOTS + QUEUE
            delay_ms = each.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
            assert 100 <= delay_ms <= 30_000 and each.trailers["grpc-retry-pushback-ms"] == str(delay_ms)
    assert_idle(server)


def test_a_deadline_that_cannot_be_met_is_refused_at_once_with_the_estimate(server: RunningServer) -> None:
    with busy(server, SLOTS + QUEUE - 1, counting(7, 100)):
        now = until(server, lambda now: now.estimated_ttft_ms > 2500)
        assert now.max_requests == SLOTS and now.max_in_flight == SLOTS + QUEUE and now.requests_per_s > 0
        refused = error_of(server, counting(7), timeout=1)
        assert (refused.code, refused.info.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE")
        assert "the first token is expected in" in refused.text
        metadata = refused.info.metadata
        assert float(metadata["estimated_ttft_ms"]) > 2 * float(metadata["deadline_ms"]) > 0
        assert 0 < int(metadata["queue_position"]) < SLOTS + QUEUE
    assert_idle(server)


def test_more_urgent_requests_go_first(server: RunningServer) -> None:
    async def queue() -> list[Ended]:
        async with grpc.aio.insecure_channel(server.address) as channel:
            stub = InferenceServiceStub(channel)
            calls = [asyncio.create_task(ask(stub, counting(7, 100))) for _ in range(SLOTS)]
            await asyncio.to_thread(until, server, lambda now: now.running == SLOTS)
            for priority in (0, 0, 0, 1, 2):
                calls.append(asyncio.create_task(ask(stub, counting(7, priority=priority))))
            await asyncio.to_thread(until, server, lambda now: now.waiting == 5)
            return await asyncio.gather(*calls)

    ended = asyncio.run(queue())
    assert all(each.code == grpc.StatusCode.OK for each in ended)
    ordinary, *urgent = (min(each.first_ns for each in ended[SLOTS:-2]), ended[-1].first_ns, ended[-2].first_ns)
    assert max(urgent) <= ordinary


def test_who_comes_again_when_told_to_gets_in_though_others_never_stop(server: RunningServer) -> None:
    """gRPC's own retries, which obey the server's pushback, against more callers than there are places, who obey nothing."""
    with busy(server, SLOTS + QUEUE + 6, counting(7)):
        until(server, lambda now: now.in_flight >= now.max_in_flight)
        options = [("grpc.service_config", json.dumps(RETRIES)), ("grpc.enable_retries", 1)]
        with grpc.insecure_channel(server.address, options) as channel:
            answers = [list(InferenceServiceStub(channel).Generate(counting(50), timeout=60)) for _ in range(2)]
    for answer in answers:
        assert [token_id for event in answer for token_id in event.delta.token_ids] == list(range(51, 51 + ANSWER))
    assert_idle(server)


def test_waiting_tokens_and_pages_are_bounded(limited: RunningServer) -> None:
    with busy(limited, 2, request([7] * 200, 1800), metadata=[("x-team", "a")]):
        until(limited, lambda now: now.running == 2)
        refused = error_of(limited, request([7] * 200, 1600))
        assert refused.info.reason == "KV_OVERCOMMITTED" and refused.info.metadata["limit"] == "350"
        with busy(limited, 1, request([7] * 900, 20), metadata=[("x-team", "b")]):
            now = until(limited, lambda now: now.waiting == 1)
            assert now.waiting_prompt_tokens == 900 and now.pages_committed >= 2 * 125
            refused = error_of(limited, request([7] * 200, 1))
            assert refused.info.reason == "TOKENS_QUEUED" and refused.info.metadata == {"limit": "1000", "queue_position": "1"}
            assert refused.detail(error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() >= 100
    assert_idle(limited)


def test_limits_of_a_client_hold_for_it_alone(limited: RunningServer) -> None:
    red, blue = [("x-team", "red")], [("x-team", "blue")]
    with busy(limited, 2, counting(7, 50), metadata=red):
        until(limited, lambda now: now.running == 2)
        refused = error_of(limited, counting(7), metadata=red)
        assert (refused.code, refused.info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_LIMIT")
        assert refused.info.metadata == {"limit": "streams", "value": "2"}
        with limited.stub() as stub:
            assert list(stub.Generate(counting(7), timeout=30, metadata=blue))
            assert stub.Tokenize(pb.TokenizeRequest(text="x"), timeout=30, metadata=blue).token_ids
            for method, made in ((stub.Tokenize, pb.TokenizeRequest(text="x")), (stub.Detokenize, pb.DetokenizeRequest(token_ids=[7]))):
                with pytest.raises(grpc.RpcError) as caught:
                    method(made, timeout=30, metadata=red)
                assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_idle(limited)


def test_tokens_of_a_client_are_charged_as_they_come(limited: RunningServer) -> None:
    """Here of those who say no name. What is overdrawn takes a while to come in, and the client is told how long."""
    with limited.stub() as stub:
        call = stub.Generate(request([7] * 1500, 500), timeout=30)
        next(iter(call))
        with Client(limited.address) as client, pytest.raises(InferenceError) as caught:
            while not call.done():
                client.generate_text([7], max_tokens=1)
        assert not call.done()
        call.cancel()
    assert caught.value.reason == "CLIENT_LIMIT" and "1600 tokens a minute" in caught.value.message
    assert caught.value.retry_delay_s is not None and caught.value.retry_delay_s > 0
    assert_idle(limited)
