"""The dispatcher of open loops, against targets that answer at once or break."""

from __future__ import annotations

import time
from collections.abc import Iterator

import gevent  # type: ignore[import-untyped]
import pytest
from gevent.event import Event  # type: ignore[import-untyped]

from inference_service.config import Config
from loadgen._streams import Streams
from loadgen._target import ErrorClass, Model, Observation, Request, Takes
from loadgen._workload import Workload

MODEL = Model("m", 100, 0, frozenset())


class AtOnce:
    protocol = "none"
    takes = Takes()

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def model(self) -> Model:
        return MODEL

    def generate(self, request: Request, observation: Observation) -> None:
        observation.sent_ns = observation.ended_ns = time.monotonic_ns()
        if self._error:
            raise self._error
        observation.cut_off = False

    def close(self) -> None: ...


def sent(target: AtOnce, due_ns: list[int]) -> tuple[list[Observation], int]:
    """What was observed of requests due at these times, and how many turns the loop had until the last was sent."""
    observations: list[Observation] = []
    streams = Streams(target, Workload(Config(), MODEL), lambda _, observation: observations.append(observation))
    exhausted, turns = Event(), 0
    streams.dispatch(((Request(output_tokens=1), due) for due in due_ns), exhausted.set)
    while not exhausted.is_set():
        turns += 1
        gevent.sleep(0)
    streams.drain(1.0)
    return observations, turns


def test_no_request_is_sent_before_it_is_due() -> None:
    now_ns = time.monotonic_ns()
    observations, _ = sent(AtOnce(), [now_ns + after for after in (0, 200_000, 1_500_000, 20_000_000)])
    assert len(observations) == 4
    assert all(one.sent_ns >= one.scheduled_ns for one in observations)


def test_a_request_is_sent_before_the_next_one_is_made() -> None:
    """To make one takes a while, where it has a long prompt."""
    observations: list[Observation] = []
    streams = Streams(AtOnce(), Workload(Config(), MODEL), lambda _, observation: observations.append(observation))
    sent_before, exhausted, now_ns = [], Event(), time.monotonic_ns()

    def schedule() -> Iterator[tuple[Request, int]]:
        for number in range(5):
            sent_before.append(len(observations))
            yield Request(output_tokens=1), now_ns + number * 3_000_000

    streams.dispatch(schedule(), exhausted.set)
    assert exhausted.wait(10)
    streams.drain(1.0)
    assert sent_before == [0, 1, 2, 3, 4]


def test_a_schedule_that_cannot_be_kept_leaves_the_loop_its_turns() -> None:
    observations, turns = sent(AtOnce(), [1] * 100)
    assert len(observations) == 100
    assert turns >= 100


def test_an_error_that_no_target_foresaw_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    (observation,), _ = sent(AtOnce(OverflowError("too much")), [1])
    assert observation.failure is not None and not observation.cut_off
    assert (observation.failure.kind, observation.failure.code) == (ErrorClass.SERVER, "OverflowError")
    assert "too much" in caplog.text
