"""Whose turn it is, and what is shared: several choices of one prompt, priorities, salts, a long queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from inference_service.config import Batch
from inference_service.engine.grammars import Grammars, Guide
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.step import StepResult
from inference_service.engine.waiting import AGING_S
from inference_service.messages import Grammar
from tests.unit.shadow import VOCAB, Harness, choices, make, reference


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_the_prompt_of_several_choices_is_computed_once(prefix: bool, page_size: int, slots: int, max_tokens: int) -> None:
    for length in (1, 8, 9, 16):
        harness = Harness(Batch(max_requests=slots, max_step_tokens=8), 200, page_size, prefix)
        family = choices(make(0, [1, 0, 0] * length, max_tokens), 4)
        for each in family:
            harness.submit(each)
        assert harness.scheduler.load.waiting == 4
        harness.finish()
        assert [harness.answers[each.key].ids for each in family] == [reference(each)[0] for each in family]
        assert harness.prefill_tokens() == 3 * length + 3, "beside the prompt, its last token for each of the other choices"
        assert harness.scheduler.pages.used == 0


def test_choices_that_come_late_still_share_the_prompt() -> None:
    harness = Harness(Batch(max_requests=8), 200, 16, prefix=False)
    first, *others = choices(make(0, [1] * 40, max_tokens=30), 4)
    harness.submit(first)
    for each in others:
        harness.step()
        harness.submit(each)
    harness.finish()
    assert harness.prefill_tokens() == 43
    late = replace(others[0], key=9)
    harness.submit(late)
    harness.finish()
    assert harness.prefill_tokens() == 83, "the first choice has ended, and with it its pages"
    assert harness.answers[9].ids == reference(late)[0]


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_choices_outlive_the_first(steps: int) -> None:
    """Aborted before its prompt is computed, the first choice leaves it to the others to compute it; afterwards they share it."""
    harness = Harness(Batch(max_requests=8, max_step_tokens=16), 200, 16, prefix=False)
    family = choices(make(0, [1] * 40, max_tokens=30), 3)
    for each in family:
        harness.submit(each)
    for _ in range(steps):
        harness.step()
    harness.scheduler.abort(0)
    harness.scheduler.check_invariants()
    harness.finish()
    assert all(harness.answers[each.key].ids == reference(each)[0] for each in family[1:])
    assert harness.prefill_tokens() == ((40 + 2) if steps >= 3 else 16 * steps + 2 * 40)


def test_prompts_held_for_forks_give_way() -> None:
    """What is held for choices that wait is taken back before anybody is preempted, and nothing waits for it in vain."""
    harness = Harness(Batch(max_requests=1), pages=8, page_size=4, prefix=False)
    for each in [*choices(make(0, [0] * 12, max_tokens=2), 2), *choices(make(10, [1] * 12, max_tokens=2, priority=1), 2)]:
        harness.submit(each)
    harness.submit(make(20, [1, 0] * 12, max_tokens=8, priority=1))
    harness.finish()
    assert harness.scheduler.preemptions == 0
    for key, answer in harness.answers.items():
        assert answer.finish and len(answer.ids) == (8 if key == 20 else 2)


def test_a_prompt_held_for_forks_stays_while_what_runs_will_make_room() -> None:
    harness = Harness(Batch(max_requests=3), pages=10, page_size=4, prefix=False)
    for each in choices(make(0, [0] * 12, max_tokens=3), 2):
        harness.submit(each)
    harness.step()
    harness.submit(make(10, [1, 0] * 12, max_tokens=2, priority=1))
    harness.finish()
    assert harness.first_admissions() == [0, 10, 1], "the large one waits until the first choice has ended, and the second for it"
    assert harness.prefill_tokens() == 12 + 24 + 1


def test_a_larger_priority_goes_first() -> None:
    harness = Harness(Batch(max_requests=1), pages=64, page_size=4)
    for key, priority in enumerate([0, 1, -(2**31), 2**31 - 1, 0, 1]):
        harness.submit(make(key, [1], priority=priority))
    harness.finish()
    assert harness.first_admissions() == [3, 1, 5, 0, 4, 2]


def test_nobody_starves() -> None:
    """Beside a stream of urgent requests that never lets up, one of no urgency waits as long as its priority is worth."""
    harness = Harness(Batch(max_requests=1), pages=64, page_size=4)
    second = 1_000_000_000
    harness.submit(make(0, [1], max_tokens=1, priority=0))
    for key in range(1, 60):
        harness.submit(make(key, [1], max_tokens=1, priority=3, arrival_ns=key * second))
        if key > 2:  # a request a second comes, and from the third on one a second goes
            harness.step()
    harness.finish()
    waited = harness.first_admissions().index(0)
    assert 3 * AGING_S - 1 <= waited <= 3 * AGING_S + 1


def test_the_least_urgent_is_preempted() -> None:
    harness = Harness(Batch(max_requests=3), pages=16, page_size=1, prefix=False)
    for key, priority in enumerate([0, -1, 1]):
        harness.submit(make(key, [key % 2], max_tokens=7, priority=priority))
    harness.finish()
    assert harness.scheduler.preemptions > 0
    assert [key for key, answer in harness.answers.items() if answer.preemptions] == [1]


def test_who_runs_is_not_preempted_for_who_waits() -> None:
    harness = Harness(Batch(max_requests=1), pages=64, page_size=4)
    harness.submit(make(0, [1], max_tokens=20))
    harness.step()
    harness.submit(make(1, [1], max_tokens=20, priority=100))
    harness.finish()
    assert harness.scheduler.preemptions == 0 and harness.first_admissions() == [0, 1]


def test_salts_keep_their_prefixes_apart() -> None:
    harness = Harness(Batch(max_requests=1), pages=64, page_size=4)
    for key, salt in enumerate(["", "a", "b", "a", "", "b"]):
        harness.submit(make(key, [0, 1] * 8, salt=salt))
        harness.finish()
    assert [answer.cached_tokens for answer in harness.answers.values()] == [0, 0, 0, 12, 12, 12]


def test_many_may_wait_and_leave() -> None:
    """The queue stays in order, and forgets those that left, whichever of thousands leave."""
    harness = Harness(Batch(max_requests=1), pages=64, page_size=4)
    harness.submit(make(0, [1], max_tokens=3))
    harness.step()
    for key in range(1, 3001):
        harness.submit(make(key, [1], max_tokens=1, priority=key % 5, deadline_ns=1000 + key % 7))
    for key in range(1, 3001):
        if key % 100:
            harness.scheduler.abort(key)
    assert harness.scheduler.load.waiting == 30
    harness.scheduler.check_invariants()
    assert len(harness.scheduler.expire(now_ns=1000)) == sum(key % 7 == 0 for key in range(100, 3001, 100))
    harness.finish()
    left = [key for key in range(100, 3001, 100) if key % 7]
    assert harness.first_admissions() == [0, *sorted(left, key=lambda key: (-(key % 5), key))]


class SlowGrammars(Grammars):
    """Makes a mask when it is told to."""

    def __init__(self) -> None:
        super().__init__("", VOCAB)
        self.made: list[Guide] = []

    def start(self, grammar: Grammar) -> Guide:
        return Guide(len(self.made), grammar)

    def advance(self, guide: Guide, token_id: int) -> None:
        guide.ready = False

    def end(self, guide: Guide) -> None:
        """Nothing is held."""

    def make(self, guide: Guide | None) -> None:
        assert guide is not None
        guide.ready = True
        self.made.append(guide)

    def poll(self) -> Iterator[Guide]:
        while self.made:
            yield self.made.pop()


def test_a_preempted_request_that_waits_for_its_mask_holds_nobody_up() -> None:
    grammars = SlowGrammars()
    scheduler = Scheduler(Batch(max_requests=4), KvPages(6, 2), grammars)

    def step() -> int:
        planned = scheduler.schedule(0)
        rows = planned.plan.rows if planned else []
        if planned:
            scheduler.update(planned, StepResult([1] * len(rows), [None] * len(rows)))
        scheduler.check_invariants()
        return len(rows)

    scheduler.submit(make(0, [1, 2], max_tokens=20))
    scheduler.submit(replace(make(1, [3, 4], max_tokens=8), grammar=Grammar("regex", "a", [0])))
    guided = next(iter(scheduler._guided.values()))
    assert step() == 1, "its grammar is not compiled"
    grammars.make(guided.guide)
    scheduler.follow_grammars()
    assert step() == 2
    while not guided.preemptions:
        assert step() == 1, "its mask is not made"
    scheduler.abort(0)
    scheduler.submit(make(2, [5], max_tokens=3))
    assert [step() for _ in range(4)] == [1, 1, 1, 0]
    grammars.make(guided.guide)
    scheduler.follow_grammars()
    assert step() == 1 and len(guided.tokens) == 4
    scheduler.abort(1)
    scheduler.check_invariants()
    assert len(scheduler) == 0 and scheduler.pages.used == 0
