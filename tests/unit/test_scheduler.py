"""The scheduler, step by step, against an executor that checks each (shadow.py)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from inference_service.config import Batch
from inference_service.messages import Finish, Submit
from tests.unit.shadow import Harness, choices, make, reference

requests = st.builds(
    make,
    key=st.just(0),
    arrival_ns=st.integers(0, 20_000_000_000),
    priority=st.sampled_from([-1, 0, 0, 0, 1, 5]),
    salt=st.sampled_from(["", "", "a", "b"]),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
    stop=st.sampled_from([(), (3,), (2, 5)]),
)


@settings(max_examples=150, deadline=None)
@given(
    submits=st.lists(requests, min_size=1, max_size=10),
    counts=st.lists(st.sampled_from([1, 1, 1, 2, 4]), min_size=10, max_size=10),
    gaps=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    aborted=st.sets(st.integers(0, 19), max_size=4),
    page_size=st.sampled_from([1, 2, 3, 8]),
    extra_pages=st.integers(0, 12),
    slots=st.integers(1, 4),
    max_step_tokens=st.integers(1, 10),
    max_prefill_tokens=st.integers(0, 5),
    rush_tokens=st.integers(0, 8),
    prefix=st.booleans(),
)
def test_every_answer_is_as_if_alone(
    submits: list[Submit], counts: list[int], gaps: list[int], aborted: set[int], page_size: int, extra_pages: int, slots: int,
    max_step_tokens: int, max_prefill_tokens: int, rush_tokens: int, prefix: bool,
) -> None:  # fmt: skip
    pages = max(-(-(len(s.token_ids) + s.max_tokens) // page_size) for s in submits) + extra_pages
    batch = Batch(max_requests=slots, max_step_tokens=max_step_tokens, max_prefill_tokens=max_prefill_tokens)
    harness = Harness(batch, pages, page_size, prefix, rush_tokens)
    everyone: list[Submit] = []
    for submit, count, gap in zip(submits, counts, gaps, strict=False):
        family = choices(replace(submit, key=len(everyone)), count)
        everyone += family
        for each in family:
            harness.submit(each)
        for _ in range(gap):
            harness.step()
        for each in family:
            if each.key in aborted:
                harness.scheduler.abort(each.key)
                harness.scheduler.check_invariants()
    harness.finish()
    for key, submit in enumerate(everyone):
        answer = harness.answers[key]
        if key in aborted and answer.finish is None:
            assert answer.ids == reference(submit)[0][: len(answer.ids)]
            continue
        assert answer.finish is not None
        assert (answer.ids, answer.finish.reason) == reference(submit)
    assert harness.scheduler.pages.used == 0
    for plan in harness.plans:
        assert plan.tokens <= harness.scheduler.max_step_tokens


def test_prefill_is_capped_while_others_decode() -> None:
    harness = Harness(Batch(max_requests=4, max_step_tokens=32, max_prefill_tokens=3), pages=64, page_size=4)
    harness.submit(make(0, [1], max_tokens=20))
    harness.step()
    harness.submit(make(1, [0] * 20, max_tokens=1))
    harness.finish()
    mixed = [plan for plan in harness.plans if len(plan.rows) > 1]
    assert len(mixed) == 7 and all(plan.rows[0].is_decode and plan.rows[1].length <= 3 for plan in mixed)
    harness.submit(make(2, [1] * 20, max_tokens=1))
    harness.step()
    assert harness.plans[-1].rows[0].length == 20, "nothing decodes, so the whole budget is prefill's"


def test_more_prefill_beside_decodes_while_many_tokens_wait() -> None:
    harness = Harness(Batch(max_requests=4, max_step_tokens=32, max_prefill_tokens=3), pages=64, page_size=4, rush_tokens=8)
    harness.submit(make(0, [1], max_tokens=40))
    harness.step()
    for key in (1, 2):
        harness.submit(make(key, [key % 2] * 10, max_tokens=1))
    assert harness.scheduler.load.waiting_tokens == 20
    harness.finish()
    chunks = [sum(row.length for row in plan.rows[1:]) for plan in harness.plans if len(plan.rows) > 1]
    assert chunks == [8, 3, 3, 3, 3], "at first 20 tokens wait, then 12"
    assert harness.scheduler.load.waiting_tokens == 0


def test_prefix_is_shared_with_a_running_request() -> None:
    harness = Harness(Batch(max_requests=4), pages=64, page_size=4)
    harness.submit(make(0, [0, 1] * 8, max_tokens=30))
    harness.step()
    harness.step()
    harness.submit(make(1, [0, 1] * 8 + [1], max_tokens=3))
    harness.finish()
    assert harness.answers[1].cached_tokens == 16
    assert harness.answers[1].ids == reference(make(1, [0, 1] * 8 + [1], max_tokens=3))[0]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    harness = Harness(Batch(max_requests=3), pages=10, page_size=1, prefix=False)
    for key in range(4):
        harness.submit(make(key, [key % 2], max_tokens=7))
    preempted = None
    while preempted is None:
        harness.step()
        preempted = next((request for request in harness.scheduler.waiting if request.preemptions), None)
    running = [request.submit.key for request in harness.scheduler.running]
    assert all(key < preempted.submit.key for key in running), "an older one lost its pages"
    assert harness.answers[preempted.submit.key].preemptions == 1, "told with the token in flight: it may be aborted before the next"
    assert harness.scheduler.waiting.first is preempted and len(harness.scheduler.waiting) > 1
    harness.finish()
    assert sum(answer.preemptions for answer in harness.answers.values()) == harness.scheduler.preemptions
    assert [answer.ids for answer in harness.answers.values()] == [reference(make(k, [k % 2], max_tokens=7))[0] for k in range(4)]


def test_a_page_for_each_running_request_is_left_for_growth() -> None:
    """Without the reserve the third request would be admitted into the last pages, and at once preempted."""
    harness = Harness(Batch(max_requests=3), pages=12, page_size=1, prefix=False)
    for key in range(3):
        harness.submit(make(key, [key % 2] * 3, max_tokens=3))
    harness.step()
    assert len(harness.scheduler.running) == 2 and harness.scheduler.pages.available == 4
    harness.finish()
    assert harness.scheduler.preemptions == 0


def test_cached_pages_count_as_taken_once_they_are_held() -> None:
    """Pages that a newcomer finds in the cache are no longer free for its other tokens."""
    harness = Harness(Batch(max_requests=3), pages=12, page_size=1)
    harness.submit(make(0, [0, 1] * 3, max_tokens=1))
    harness.finish()
    harness.submit(make(1, [1] * 3, max_tokens=6))
    harness.step()
    harness.submit(make(2, [0, 1] * 3 + [1, 1], max_tokens=1))
    harness.finish()
    assert harness.answers[2].ids == reference(make(2, [0, 1] * 3 + [1, 1], max_tokens=1))[0]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    harness = Harness(Batch(max_requests=3), pages=10, page_size=1)
    for key in range(3):
        harness.submit(make(key, [key % 2, 0, key // 2], max_tokens=5))
    harness.finish()
    assert harness.scheduler.preemptions > 0
    assert harness.answers[0].cached_tokens == 0 and all(answer.cached_tokens <= 2 for answer in harness.answers.values())


def test_deadlines_expire_in_the_queue_and_while_decoding() -> None:
    harness = Harness(Batch(max_requests=1), pages=64, page_size=4)
    harness.submit(make(0, [0], max_tokens=50, deadline_ns=100))
    harness.submit(make(1, [1], max_tokens=50, deadline_ns=50))
    for _ in range(3):
        harness.step()
    assert harness.scheduler.expire(now_ns=49) == []
    (queued, output), = harness.scheduler.expire(now_ns=50)  # fmt: skip
    assert (queued.submit.key, output.finish, output.scheduled_ns) == (1, Finish("deadline"), 0)
    (running, output), = harness.scheduler.expire(now_ns=100)  # fmt: skip
    assert running.submit.key == 0 and output.finish == Finish("deadline")
    assert harness.scheduler.pages.used == 0
    harness.step()
    harness.scheduler.check_invariants()


def test_abort_frees_pages_before_the_next_step() -> None:
    harness = Harness(Batch(max_requests=2), pages=64, page_size=4)
    harness.submit(make(0, [0] * 9, max_tokens=50))
    harness.step()
    assert harness.scheduler.pages.used == 3
    harness.scheduler.abort(0)
    assert harness.scheduler.pages.used == 0 and len(harness.scheduler) == 0
    harness.finish()
