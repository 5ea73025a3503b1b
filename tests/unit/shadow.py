"""The scheduler's loop with an executor that checks each step: what a row reads from its pages must be the tokens of its sequence.

The executor keeps a shadow of the KV pool in which a cell remembers all tokens that it depends on, and the salt of who computed it. The
token it draws is a hash of the whole sequence and the seed, so any mix-up of pages, slots or chunks shows in the answer, which must equal
the one computed without any of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from msgspec.structs import replace

from inference_service.config import Batch
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import StepPlan, StepResult
from inference_service.messages import Finish, Output, Sampling, Submit

VOCAB = 7
Cell = tuple[str | int, ...]
"""The salt, then the tokens up to and including the cell's."""


def next_token(tokens: tuple[str | int, ...], seed: int, banned: list[int]) -> int:
    """The next token of a sequence: a hash of it among those not banned."""
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[hashlib.blake2b(repr((tokens, seed)).encode(), digest_size=2).digest()[0] % len(allowed)]


def reference(submit: Submit) -> tuple[list[int], str]:
    """What a request must answer, computed alone."""
    output: list[int] = []
    while len(output) < submit.max_tokens:
        banned = submit.stop_token_ids if len(output) < submit.min_tokens else []
        token = next_token((*submit.token_ids, *output), submit.sampling.seed, banned)
        if token in submit.stop_token_ids:
            return output, "stop"
        output.append(token)
    return output, "length"


class ShadowExecutor:
    """Runs plans on a pool whose cells hold the sequence up to and including their token."""

    def __init__(self, pages: int, page_size: int, slots: int) -> None:
        self.page_size = page_size
        self.cells: list[Cell | None] = [None] * (pages * page_size)
        self.last: list[int] = [-1] * slots

    def run(self, plan: StepPlan, salts: list[str]) -> StepResult:
        decodes = [row.is_decode for row in plan.rows]
        assert decodes == sorted(decodes, reverse=True), "decode rows come first"
        size = self.page_size
        copied = [self.cells[source * size : (source + 1) * size] for source, _ in plan.copies]
        for (_, target), cells in zip(plan.copies, copied, strict=True):
            self.cells[target * size : (target + 1) * size] = cells
        drawn = []
        for row, salt in zip(plan.rows, salts, strict=True):
            ids = row.token_ids or [self.last[row.slot]]
            assert len(ids) == row.length
            before = self.cells[self.cell(row.pages, row.start - 1)] if row.start else (salt,)
            assert before is not None and len(before) == 1 + row.start and before[0] == salt
            for position in range(row.start):
                assert self.cells[self.cell(row.pages, position)] == before[: position + 2], "a page does not hold this sequence"
            for offset in range(row.length):
                self.cells[self.cell(row.pages, row.start + offset)] = (*before, *ids[: offset + 1])
            if row.samples:
                self.last[row.slot] = next_token((*before[1:], *ids), row.sampling.seed, row.banned_ids)
                drawn.append(self.last[row.slot])
        return StepResult(drawn, [None] * len(drawn))

    def cell(self, pages: list[int], position: int) -> int:
        return pages[position // self.page_size] * self.page_size + position % self.page_size


@dataclass
class Answer:
    ids: list[int]
    cached_tokens: int = -1
    finish: Finish | None = None
    preemptions: int = 0


class Harness:
    """The engine's loop, one step at a time, with steps overlapped as there."""

    def __init__(self, batch: Batch, pages: int, page_size: int, prefix: bool = True, rush_tokens: int = 0) -> None:
        self.scheduler = Scheduler(batch, KvPages(pages, page_size, prefix=prefix), rush_tokens=rush_tokens)
        self.executor = ShadowExecutor(pages, page_size, batch.max_requests)
        self.in_flight: tuple[Scheduled, StepResult] | None = None
        self.answers: dict[int, Answer] = {}
        self.steps: list[Scheduled] = []

    def submit(self, submit: Submit) -> None:
        self.answers[submit.key] = Answer([])
        self.scheduler.submit(submit)

    def step(self) -> bool:
        running, preemptions = set(self.scheduler.running), self.scheduler.preemptions
        scheduled = self.scheduler.schedule(now_ns=1)
        if self.scheduler.preemptions > preemptions:
            assert running.issuperset(self.scheduler.running), "somebody is admitted in the step that preempts another"
        launched = None
        if scheduled:
            self.check_writes(scheduled.plan)
            salts = [request.submit.cache_salt for request in scheduled.requests]
            launched = (scheduled, self.executor.run(scheduled.plan, salts))
            self.steps.append(scheduled)
        if self.in_flight:
            self.collect([output for _, output in self.scheduler.update(*self.in_flight)])
        self.in_flight = launched
        self.scheduler.check_invariants()
        return bool(launched) or bool(len(self.scheduler))

    @property
    def plans(self) -> list[StepPlan]:
        return [step.plan for step in self.steps]

    def check_writes(self, plan: StepPlan) -> None:
        """A page that a row writes is in no other request's page table."""
        holders = Counter(page for request in self.scheduler.running for page in request.pages)
        size = self.executor.page_size
        for row in plan.rows:
            written = row.pages[row.start // size : -(-row.position // size)]
            assert all(holders[page] == 1 for page in written), "a shared page is written"
        assert all(holders[target] == 1 for _, target in plan.copies)

    def first_admissions(self) -> list[int]:
        """The order in which requests were first put into a step."""
        return list(dict.fromkeys(request.submit.key for step in self.steps for request in step.requests))

    def prefill_tokens(self) -> int:
        return sum(len(row.token_ids) for plan in self.plans for row in plan.rows)

    def collect(self, outputs: list[Output]) -> None:
        for output in outputs:
            answer = self.answers[output.key]
            assert answer.finish is None, "an output after the end"
            if output.scheduled_ns:
                assert answer.cached_tokens == -1, "scheduled twice"
                answer.cached_tokens = output.cached_tokens
            assert answer.cached_tokens >= 0, "output before it was scheduled"
            answer.ids += output.token_ids
            answer.finish, answer.preemptions = output.finish, output.preemptions

    def finish(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError(f"not finished after {limit} steps: {self.scheduler.running} {self.scheduler.waiting}")


def make(
    key: int,
    prompt: list[int],
    max_tokens: int = 5,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (),
    deadline_ns: int = 0,
    arrival_ns: int = 1,
    priority: int = 0,
    salt: str = "",
) -> Submit:
    sampling = Sampling(1.0, 0, 1.0, 0.0, seed=0)
    return Submit(
        key, prompt, sampling, max_tokens, min_tokens, list(stop), -1, arrival_ns, deadline_ns, priority=priority, cache_salt=salt
    )


def choices(submit: Submit, n: int) -> list[Submit]:
    """The request and its forks, whose keys follow."""
    forks = [
        replace(submit, key=submit.key + choice, sampling=replace(submit.sampling, seed=choice), fork_of=submit.key)
        for choice in range(1, n)
    ]
    return [submit, *forks]
