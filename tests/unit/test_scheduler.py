"""The scheduler against an executor that checks each step: what a row reads from its pages must be the tokens of its sequence.

The executor keeps a shadow of the KV pool in which a cell remembers all tokens that it depends on. The token it draws is a hash of the
whole sequence, so any mix-up of pages, slots or chunks shows in the answer, which must equal the one computed without any of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.config import Batch
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import StepPlan, StepResult
from inference_service.messages import Finish, Output, Sampling, Submit

VOCAB = 7
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def next_token(tokens: tuple[int, ...], banned: list[int]) -> int:
    """The next token of a sequence: a hash of it among those not banned."""
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[hashlib.blake2b(bytes(tokens), digest_size=2).digest()[0] % len(allowed)]


def reference(submit: Submit) -> tuple[list[int], str]:
    """What a request must answer, computed alone."""
    output: list[int] = []
    while len(output) < submit.max_tokens:
        banned = submit.stop_token_ids if len(output) < submit.min_tokens else []
        token = next_token((*submit.token_ids, *output), banned)
        if token in submit.stop_token_ids:
            return output, "stop"
        output.append(token)
    return output, "length"


class ShadowExecutor:
    """Runs plans on a pool whose cells hold the sequence up to and including their token."""

    def __init__(self, pages: int, page_size: int, slots: int) -> None:
        self.page_size = page_size
        self.cells: list[tuple[int, ...] | None] = [None] * (pages * page_size)
        self.last: list[int] = [-1] * slots

    def run(self, plan: StepPlan) -> StepResult:
        decodes = [row.is_decode for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "decode rows come first"
        drawn = []
        for row in plan.rows:
            ids = row.token_ids or [self.last[row.slot]]
            assert len(ids) == row.length
            before = self.cells[self.cell(row.pages, row.start - 1)] if row.start else ()
            assert before is not None and len(before) == row.start
            for position in range(row.start):
                assert self.cells[self.cell(row.pages, position)] == before[: position + 1], "a page does not hold this sequence"
            for offset in range(row.length):
                self.cells[self.cell(row.pages, row.start + offset)] = (*before, *ids[: offset + 1])
            if row.samples:
                self.last[row.slot] = next_token((*before, *ids), row.banned_ids)
                drawn.append(self.last[row.slot])
        return StepResult(drawn, [None] * len(drawn))

    def cell(self, pages: list[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size


@dataclass
class Answer:
    ids: list[int]
    cached_tokens: int = -1
    finish: Finish | None = None


class Harness:
    """The engine's loop, one step at a time, with steps overlapped as there."""

    def __init__(self, batch: Batch, pages: int, page_size: int, prefix: bool = True) -> None:
        self.scheduler = Scheduler(batch, KvPages(pages, page_size, prefix=prefix))
        self.executor = ShadowExecutor(pages, page_size, batch.max_requests)
        self.in_flight: tuple[Scheduled, StepResult] | None = None
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []

    def submit(self, submit: Submit) -> None:
        self.answers[submit.key] = Answer([])
        self.scheduler.submit(submit)

    def step(self) -> bool:
        scheduled = self.scheduler.schedule(now_ns=1)
        launched = (scheduled, self.executor.run(scheduled.plan)) if scheduled else None
        if scheduled:
            self.plans.append(scheduled.plan)
        if self.in_flight:
            self.collect([output for _, output in self.scheduler.update(*self.in_flight)])
        self.in_flight = launched
        self.scheduler.check_invariants()
        return bool(launched) or bool(len(self.scheduler))

    def collect(self, outputs: list[Output]) -> None:
        for output in outputs:
            answer = self.answers[output.key]
            assert answer.finish is None, "an output after the end"
            if output.scheduled_ns:
                assert answer.cached_tokens == -1, "scheduled twice"
                answer.cached_tokens = output.cached_tokens
            assert answer.cached_tokens >= 0, "output before it was scheduled"
            answer.ids += output.token_ids
            answer.finish = output.finish

    def finish(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"not finished after {limit} steps: {self.scheduler.running} {self.scheduler.waiting}")


def make(key: int, prompt: list[int], max_tokens: int = 5, min_tokens: int = 0, stop: tuple[int, ...] = (), deadline_ns: int = 0) -> Submit:
    return Submit(key, prompt, GREEDY, max_tokens, min_tokens, list(stop), -1, 1, deadline_ns)


requests = st.builds(
    make,
    key=st.just(0),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
    max_tokens=st.integers(1, 12),
    min_tokens=st.integers(0, 4),
    stop=st.sampled_from([(), (3,), (2, 5)]),
)


@settings(max_examples=150, deadline=None)
@given(
    submits=st.lists(requests, min_size=1, max_size=10),
    gaps=st.lists(st.integers(0, 4), min_size=10, max_size=10),
    aborted=st.sets(st.integers(0, 9), max_size=3),
    page_size=st.sampled_from([1, 2, 3, 8]),
    extra_pages=st.integers(0, 12),
    slots=st.integers(1, 4),
    max_step_tokens=st.integers(1, 10),
    max_prefill_tokens=st.integers(0, 5),
    prefix=st.booleans(),
)
def test_every_answer_is_as_if_alone(
    submits: list[Submit], gaps: list[int], aborted: set[int], page_size: int, extra_pages: int, slots: int, max_step_tokens: int,
    max_prefill_tokens: int, prefix: bool,
) -> None:  # fmt: skip
    pages = max(-(-(len(s.token_ids) + s.max_tokens) // page_size) for s in submits) + extra_pages
    batch = Batch(max_requests=slots, max_step_tokens=max_step_tokens, max_prefill_tokens=max_prefill_tokens)
    harness = Harness(batch, pages, page_size, prefix)
    for key, (submit, gap) in enumerate(zip(submits, gaps, strict=False)):
        harness.submit(make(key, submit.token_ids, submit.max_tokens, submit.min_tokens, tuple(submit.stop_token_ids)))
        for _ in range(gap):
            harness.step()
        if key in aborted:
            harness.scheduler.abort(key)
            harness.scheduler.check_invariants()
    harness.finish()
    for key, submit in enumerate(submits):
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
    assert harness.scheduler.waiting[0] is preempted and len(harness.scheduler.waiting) > 1
    harness.finish()
    assert sum(answer.finish.preemptions for answer in harness.answers.values() if answer.finish) == harness.scheduler.preemptions
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
