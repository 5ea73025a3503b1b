"""What is admitted, and what is estimated: pure counting, by a clock and frames that the tests make."""

from __future__ import annotations

from contextlib import ExitStack
from math import inf
from statistics import median
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_service.config import Batch, Config, Limits, Server
from inference_service.messages import Load, Output, Ready, Sampling, Step, StepWork, Submit
from inference_service.rpc.admission import FRESH_S, MARGIN, MAX_RETRY_S, MIN_RETRY_S, UNKNOWN_RETRY_S, Admission, Ticket, pages_needed
from inference_service.rpc.caller import ClientLimits
from inference_service.rpc.client_limits import Client
from inference_service.rpc.errors import RpcError
from inference_service.rpc.estimator import ENOUGH, LATEST, Estimator

STEP_S = 0.02
PAGE = 16
READY = Ready("Echo", "none", 0, 1000, 2048, "none", "none", PAGE, 100, [], 128)


class Desk:
    """An admission with what is around it: the clock, the engine's frames, and the requests that were taken."""

    def __init__(self, slots: int = 4, queue: int = 8, limits: Limits | None = None) -> None:
        self.now_s = 1000.0
        batch = Batch(max_requests=slots, max_prefill_tokens=128)
        config = Config(batch=batch, server=Server(max_queue=queue), limits=limits or Limits())
        self.admission = Admission(config, lambda: self.now_s)
        self.keys = iter(range(1, 1_000_000))
        self.open: dict[int, ExitStack] = {}

    def take(self, tokens: int = 10, max_tokens: int = 10, left_s: float = inf, **more: Any) -> int:
        """A request that is admitted, else an RpcError; its key."""
        ticket = Ticket(deadline_s=self.now_s + left_s, max_tokens=max_tokens, **more)
        with ExitStack() as stack:
            stack.enter_context(self.admission.request(ticket))
            submits = [submit(next(self.keys), tokens, max_tokens) for _ in range(ticket.choices)]
            self.admission.commit(ticket, submits, READY)
            self.open[submits[0].key] = stack.pop_all()
        return submits[0].key

    def end(self, key: int) -> None:
        self.open.pop(key).close()

    def step(
        self,
        *begun: int,
        running: int = 4,
        waiting: int = 0,
        prefill: int = 0,
        seconds: float = STEP_S,
        tokens: tuple[int, ...] = (),
    ) -> None:
        """A frame in which requests begin, and others have a token."""
        self.now_s += seconds
        outputs = [Output(key, [], scheduled_ns=1) for key in begun] + [Output(key, [7]) for key in tokens]
        work = StepWork(1, prefill, int(seconds * 1e9), 0)
        self.admission.follow(Step(0, outputs, Load(running, waiting, 0, 0), work=work))

    @property
    def is_empty(self) -> bool:
        admission = self.admission
        return not (self.open or admission.in_flight or admission.pages or admission.waiting_tokens or admission._waiting)


def submit(key: int, tokens: int, max_tokens: int) -> Submit:
    return Submit(key, [1] * tokens, Sampling(0, 0, 1, 0, 0), max_tokens, 0, [], -1, 0, 0)


def refused(desk: Desk, reason: str, **request: Any) -> RpcError:
    with pytest.raises(RpcError) as caught:
        desk.take(**request)
    assert caught.value.reason == reason
    return caught.value


def test_requests_in_flight_are_bounded_and_a_few_places_are_kept_for_those_refused_before() -> None:
    desk = Desk(slots=2, queue=8)
    keys = [desk.take() for _ in range(8)] + [desk.take(choices=2)]
    desk.step(*keys[:2], waiting=7)
    error = refused(desk, "QUEUE_FULL")
    assert error.code == grpc.StatusCode.RESOURCE_EXHAUSTED and "10 answers are in flight, of at most 10" in error.message
    assert error.metadata == {"queue_position": "7", "limit": "10"}
    again = desk.take(again=True)
    refused(desk, "QUEUE_FULL", again=True)
    desk.end(keys[0])
    refused(desk, "QUEUE_FULL")
    for key in (*keys[1:], again):
        desk.end(key)
    assert desk.is_empty


def test_whatever_fails_between_leaves_nothing_behind() -> None:
    desk = Desk()
    with pytest.raises(ZeroDivisionError), desk.admission.request(Ticket()):
        assert desk.admission.in_flight == 1
        raise ZeroDivisionError
    assert desk.is_empty


def test_tokens_that_wait_are_bounded_but_one_prompt_may_always() -> None:
    desk = Desk(limits=Limits(max_queued_tokens=100))
    first = desk.take(tokens=500)
    error = refused(desk, "TOKENS_QUEUED", tokens=1)
    assert error.metadata == {"queue_position": "1", "limit": "100"}
    desk.step(first)
    second = desk.take(tokens=60)
    desk.take(tokens=40)
    refused(desk, "TOKENS_QUEUED", tokens=1)
    desk.end(second)
    desk.take(tokens=60)
    refused(desk, "TOKENS_QUEUED", tokens=1)


def test_pages_that_may_come_to_be_needed_are_bounded_but_one_request_may_always() -> None:
    desk = Desk(limits=Limits(max_kv_share=0.5))
    alone = desk.take(tokens=800, max_tokens=480)
    assert desk.admission.pages == 80
    error = refused(desk, "KV_OVERCOMMITTED", tokens=1, max_tokens=1)
    assert error.metadata["limit"] == "50" and "80 KV pages, of at most 50: 1 more" in error.message
    desk.end(alone)
    desk.take(tokens=10, max_tokens=30 * PAGE - 10)
    desk.take(tokens=10, max_tokens=20 * PAGE - 10)
    refused(desk, "KV_OVERCOMMITTED", tokens=1, max_tokens=1)


@given(prompt=st.integers(1, 300), answer=st.integers(1, 300), choices=st.integers(1, 16), page=st.integers(1, 64))
def test_choices_share_the_full_pages_of_their_prompt(prompt: int, answer: int, choices: int, page: int) -> None:
    used = {(-1, place) for place in range(prompt // page)}
    used |= {(choice, place) for choice in range(choices) for place in range(prompt // page, -(-(prompt + answer) // page))}
    assert pages_needed(prompt, answer, choices, page) == len(used)


def test_the_time_to_retry_follows_from_the_rate_at_which_requests_end() -> None:
    desk = Desk(slots=2, queue=2)
    assert refused_full(desk).retry_s == UNKNOWN_RETRY_S
    ended_at(desk, per_s=4.0)
    delays = [refused(desk, "QUEUE_FULL").retry_s for _ in range(6)]
    assert delays == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0]), "each a time of its own, until the four in flight have ended"
    desk.now_s += 0.5
    assert refused(desk, "QUEUE_FULL").retry_s == pytest.approx(0.75)
    ended_at(desk, per_s=100.0)
    assert refused(desk, "QUEUE_FULL").retry_s == MIN_RETRY_S
    ended_at(desk, per_s=0.01)
    assert refused(desk, "QUEUE_FULL").retry_s == MAX_RETRY_S


def refused_full(desk: Desk) -> RpcError:
    while desk.admission.in_flight < desk.admission.max_in_flight:
        desk.take()
    return refused(desk, "QUEUE_FULL")


def ended_at(desk: Desk, per_s: float) -> None:
    """Ten seconds and more in which requests ended at a rate, and others took their places."""
    desk.now_s += 100
    for _ in range(max(20, int(15 * per_s))):
        desk.admission.measure()
        key = next(iter(desk.open))
        desk.step(key, seconds=0)
        desk.end(key)
        desk.take()
        desk.now_s += 1 / per_s
        desk.admission.measure()


def busy(desk: Desk, per_step: int) -> None:
    """The queue is full, and every so many steps one request ends and another one begins."""
    running = [desk.take() for _ in range(4)]
    queued = [desk.take() for _ in range(8)]
    desk.step(*running, waiting=8)
    for _ in range(30):
        for _ in range(per_step):
            desk.step(waiting=8)
        desk.end(running.pop(0))
        begins = queued.pop(0)
        desk.step(begins, waiting=8)
        running.append(begins)
        queued.append(desk.take())


def test_a_deadline_that_the_queue_cannot_meet_is_refused_with_the_estimate() -> None:
    """A turn comes every 5 steps, a first token a step after it, and an answer ends 19 steps after its turn."""
    desk = Desk()
    busy(desk, per_step=4)
    desk.end(next(reversed(desk.open)))
    first_s, answer_s = 7 * 5 * STEP_S + STEP_S, 19 * STEP_S
    assert desk.admission.first_token_s() == pytest.approx(first_s, rel=0.05)
    enough_s = 1.1 * MARGIN * (first_s + answer_s)
    desk.end(desk.take(left_s=enough_s, max_tokens=1000))
    error = refused(desk, "DEADLINE_UNREACHABLE", left_s=first_s + answer_s, max_tokens=1000)
    assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED and not error.retry_s
    assert float(error.metadata["estimated_ttft_ms"]) == pytest.approx(first_s * 1000, rel=0.05)
    assert float(error.metadata["estimated_answer_ms"]) == pytest.approx(answer_s * 1000, rel=0.05)
    assert (error.metadata["deadline_ms"], error.metadata["queue_position"]) == (f"{(first_s + answer_s) * 1000:.0f}", "7")
    assert "expected in 0.7" in error.message and "deadline is in 1.1 s" in error.message
    desk.end(desk.take(left_s=1.1 * (first_s * MARGIN + 4 * STEP_S), max_tokens=2))
    desk.end(desk.take(left_s=1.1 * MARGIN * (STEP_S + answer_s), max_tokens=1000, priority=1))


def test_a_burst_into_an_idle_engine_is_judged_by_its_free_slots() -> None:
    """Not by the queue before it. What is more than fits into these has to wait, though the engine has not said so yet."""
    desk = Desk()
    busy(desk, per_step=20)
    for key in list(desk.open):
        desk.end(key)
    desk.step(running=0)
    for _ in range(5):
        desk.take(left_s=0.1)
    refused(desk, "DEADLINE_UNREACHABLE", left_s=0.1)


def test_what_was_measured_before_a_pause_refuses_nobody() -> None:
    """Else requests with short deadlines were refused for ever after the long steps of others: none would make the next step."""
    desk = Desk()
    for _ in range(LATEST):
        key = desk.take(tokens=100)
        desk.step(key, prefill=4096, seconds=0.5)
        desk.end(key)
    refused(desk, "DEADLINE_UNREACHABLE", left_s=0.2)
    desk.now_s += FRESH_S + 0.1
    for _ in range(3):
        key = desk.take(left_s=0.2)
        desk.step(key, running=1)
        desk.end(key)


def test_a_step_of_many_seconds_is_no_pause() -> None:
    desk = Desk()
    for _ in range(ENOUGH):
        desk.step()
    for _ in range(int(FRESH_S) + 5):
        desk.now_s += 1
        desk.admission.follow(Step(0, [], Load(4, 0, 0, 0)))
    refused(desk, "DEADLINE_UNREACHABLE", left_s=STEP_S / 3)


def test_a_queue_of_long_ago_says_nothing_of_a_burst() -> None:
    desk = Desk()
    busy(desk, per_step=140)
    for key in list(desk.open):
        desk.end(key)
    assert desk.admission._estimator.first_token_s(2, 0) == pytest.approx(2 * 141 * STEP_S, rel=0.1)
    for _ in range(6000):
        desk.step(running=1)
    desk.step(running=0)
    for _ in range(6):
        desk.take(left_s=1.0)


def test_nothing_is_refused_before_enough_was_measured() -> None:
    desk = Desk(queue=1000, limits=Limits(max_kv_share=1e9))
    for _ in range(500):
        desk.take(tokens=2000, left_s=0.001)
    assert desk.admission.first_token_s() is None


def test_a_prompt_that_takes_longer_than_its_deadline_is_refused_after_it_is_read() -> None:
    desk = Desk()
    for _ in range(ENOUGH):
        desk.step(prefill=128)
    desk.end(desk.take(tokens=1280, left_s=0.12))
    refused(desk, "DEADLINE_UNREACHABLE", tokens=1280, left_s=0.1)
    assert desk.is_empty


def test_a_client_pays_for_its_prompt_at_once_and_for_answers_as_they_come() -> None:
    desk = Desk()
    client = Client(ClientLimits(tokens_per_min=60, requests_per_s=100), lambda: desk.now_s)
    key = desk.take(tokens=59, client=client)
    client.check()
    desk.step(key, seconds=0)
    for _ in range(3):
        desk.step(tokens=(key, 999), seconds=0)
    assert refused(desk, "CLIENT_LIMIT", client=client).retry_s == pytest.approx(2.0)
    desk.end(key)
    desk.step(tokens=(key,), seconds=0)
    assert refused(desk, "CLIENT_LIMIT", client=client).retry_s == pytest.approx(2.0), "what comes after the end is nobody's"


def test_each_choice_counts_against_requests_a_second() -> None:
    desk = Desk(slots=64)
    client = Client(ClientLimits(requests_per_s=4), lambda: desk.now_s)
    desk.take(choices=16, client=client)
    assert refused(desk, "CLIENT_LIMIT", client=client).retry_s == pytest.approx(3.25)


def test_one_slow_step_says_nothing_of_the_next() -> None:
    estimator = Estimator(128)
    for seconds in [60.0] + [STEP_S] * (LATEST // 2):
        estimator.step(StepWork(1, 0, int(seconds * 1e9), 0), 0)
    assert estimator.first_token_s(0, 0) == pytest.approx(STEP_S)


@given(
    steps=st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 4096), st.integers(0, 50), st.integers(0, 3)), max_size=100),
    prompts=st.lists(st.tuples(st.integers(1, 10**5), st.floats(0, 1)), max_size=20),
    ahead=st.integers(0, 100),
    tokens=st.integers(0, 10**6),
)
def test_an_estimate_is_a_time_that_grows_with_what_is_ahead(
    steps: list[tuple[int, int, int, int]], prompts: list[tuple[int, float]], ahead: int, tokens: int
) -> None:
    estimator = Estimator(128)
    for duration_ns, prefill, waiting, ended in steps:
        estimator.ended(ended)
        estimator.step(StepWork(1, prefill, duration_ns, 0), waiting)
    for length, share in prompts:
        estimator.prompt(length, int(length * share))
    estimate_s = estimator.first_token_s(ahead, tokens)
    if len(steps) < ENOUGH:
        assert estimate_s is None
        return
    more_s = estimator.first_token_s(ahead + 1, tokens + 1)
    assert estimate_s is not None and more_s is not None and 0 <= estimate_s <= more_s < float("inf")


@given(answers=st.lists(st.floats(0, 1000), min_size=ENOUGH, max_size=100), step_ns=st.integers(0, 10**9), least=st.integers(0, 100))
def test_an_answer_takes_what_most_take_but_not_more_than_its_length(answers: list[float], step_ns: int, least: int) -> None:
    estimator = Estimator(128)
    for seconds in answers:
        assert len(answers) >= ENOUGH and estimator.answer_s(0, inf) is None
        estimator.answered(seconds)
    for _ in range(ENOUGH):
        estimator.step(StepWork(1, 0, step_ns, 0), 0)
    usual, step_s = median(answers[-LATEST:]), step_ns / 1e9
    assert estimator.answer_s(0, inf) == usual
    assert estimator.answer_s(least, inf) == max(usual, least * step_s)
    assert estimator.answer_s(least, least + 1) == max(least * step_s, min(usual, (least + 1) * step_s))


def test_what_the_prefix_cache_has_need_not_be_computed() -> None:
    estimator = Estimator(100)
    for _ in range(ENOUGH):
        estimator.step(StepWork(1, 100, int(STEP_S * 1e9), 0), 0)
    assert estimator.first_token_s(0, 1000) == pytest.approx(11 * STEP_S)
    for _ in range(10):
        estimator.prompt(1000, 750)
    assert estimator.first_token_s(0, 1000) == pytest.approx(3.5 * STEP_S)
