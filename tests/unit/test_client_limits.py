"""Limits of clients, by a clock that the tests move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from math import ceil

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.config import Limits
from inference_service.rpc.caller import CALLER, Caller, ClientLimits
from inference_service.rpc.client_limits import MAX_IDLE, MAX_NAME, Bucket, Client, Clients
from inference_service.rpc.errors import RpcError


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def caller() -> Iterator[None]:
    yield
    CALLER.set(None)


def refusal(client: Client | None) -> RpcError:
    assert client is not None
    with pytest.raises(RpcError) as caught:
        client.check()
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT_LIMIT")
    return caught.value


@given(
    rate=st.floats(0.01, 1000),
    capacity=st.floats(1, 1000),
    takes=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 2000)), max_size=20),
    amount=st.floats(0, 1),
)
def test_a_bucket_fills_at_its_rate(rate: float, capacity: float, takes: list[tuple[float, float]], amount: float) -> None:
    """Against the plain form of it: a level that grows up to the capacity, and may fall below 0."""
    bucket, level, now_s = Bucket(rate, capacity), capacity, 0.0
    for pause_s, taken in takes:
        now_s, level = now_s + pause_s, min(capacity, level + pause_s * rate) - taken
        bucket.take(now_s, taken)
    wait_s = bucket.wait_s(now_s, amount)
    assert wait_s == pytest.approx(max(0.0, (amount - level) / rate), rel=1e-6, abs=1e-5)
    assert bucket.wait_s(now_s + wait_s, amount) == 0


def test_streams_at_once(clock: Clock) -> None:
    clients = Clients(Limits(client_key="x-team", client_streams=2), clock)
    mine, other = [("x-team", "red")], [("x-team", "blue")]
    with clients.call(mine) as first, clients.call(mine) as second:
        assert first is second and first is not None
        first.check()
        with clients.call(mine) as third:
            error = refusal(third)
            assert error.metadata == {"limit": "streams", "value": "2"} and error.retry_s > 0
        with clients.call(other) as fourth:
            assert fourth is not None
            fourth.check()
        first.check()


def test_requests_a_second_and_the_exact_time_to_retry(clock: Clock) -> None:
    clients = Clients(Limits(client_key="X-Team", client_requests_per_s=4), clock)
    for _ in range(4):
        with clients.call([("x-team", "red")]) as client:
            assert client is not None
            client.check()
            client.pay_requests(1)
    with clients.call([("x-team", "red")]) as client:
        error = refusal(client)
        assert error.metadata["limit"] == "requests_per_s" and error.retry_s == pytest.approx(0.25)
        clock.now_s += error.retry_s - 0.001
        refusal(client)
        clock.now_s += 0.001
        assert client is not None
        client.check()


def test_less_than_a_request_a_second_still_admits_one(clock: Clock) -> None:
    client = Client(ClientLimits(requests_per_s=0.1), clock)
    client.check()
    client.pay_requests(1)
    assert refusal(client).retry_s == pytest.approx(10)


def test_tokens_a_minute_may_be_overdrawn_once(clock: Clock) -> None:
    client = Client(ClientLimits(tokens_per_min=600), clock)
    client.pay_tokens(599)
    client.check()
    client.pay_tokens(21)
    assert refusal(client).retry_s == pytest.approx(2.0)
    client.pay_tokens(10)
    error = refusal(client)
    assert error.retry_s == pytest.approx(3.0) and "600 tokens a minute" in error.message
    clock.now_s += 3.0
    client.check()


def test_trailers_never_promise_too_early() -> None:
    error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "X", "x", retry_s=1.0001)
    assert dict(error.trailing_metadata())["grpc-retry-pushback-ms"] == str(ceil(1000.1))


def test_a_token_outweighs_the_key_and_its_limits_the_common_ones(clock: Clock, caller: None) -> None:
    clients = Clients(Limits(client_key="x-team", client_streams=1), clock)
    CALLER.set(Caller("red", ClientLimits(streams=2)))
    with clients.call([("x-team", "a")]) as first, clients.call([("x-team", "b")]) as second:
        assert first is second and first is not None
        first.check()
        CALLER.set(None)
        with clients.call([("x-team", "red")]) as other:
            assert other is not first and other is not None
            other.check()
    CALLER.set(Caller("green", ClientLimits()))
    with clients.call([]) as free:
        assert free is None
    CALLER.set(Caller("grey", None))
    with clients.call([]), clients.call([]) as second:
        refusal(second)


def test_without_a_key_nobody_is_limited_and_with_one_those_who_say_nothing_are_one(clock: Clock) -> None:
    with Clients(Limits(client_streams=1), clock).call([("x-team", "red")]) as client:
        assert client is None
    clients = Clients(Limits(client_key="x-team", client_streams=1), clock)
    with clients.call([]), clients.call(None) as second:
        refusal(second)
    with pytest.raises(RpcError, match=f"metadata.x-team: at most {MAX_NAME}"), clients.call([("x-team", "x" * (MAX_NAME + 1))]):
        pass


def test_many_names_take_bounded_memory_and_busy_clients_are_not_forgotten(clock: Clock) -> None:
    clients = Clients(Limits(client_key="k", client_requests_per_s=1), clock)
    with ExitStack() as stack:
        busy = stack.enter_context(clients.call([("k", "busy")]))
        assert busy is not None
        busy.pay_requests(1)
        for number in range(MAX_IDLE + 100):
            with clients.call([("k", str(number))]) as client:
                assert client is not None
                client.pay_requests(1)
        assert len(clients) == MAX_IDLE + 1
        with clients.call([("k", "busy")]) as again:
            assert again is busy
        with clients.call([("k", str(MAX_IDLE + 99))]) as latest:
            refusal(latest)
        with clients.call([("k", "0")]) as forgotten:
            assert forgotten is not None
            forgotten.check()
