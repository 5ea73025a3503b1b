"""Continuous batching: which tokens of which requests the next step computes.

One budget of tokens a step: first one token for every request that decodes, then prefill chunks in order of arrival. While anything
decodes, prefill is capped, so that a long prompt slows decodes by a bounded amount instead of stalling them.

Steps overlap: `schedule` plans step N + 1 while step N runs, before its sampled ids are known. A request whose answer turns out to have
ended with step N has then computed one token too many, which `update` drops.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from inference_service.config import Batch
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.requests import Request
from inference_service.engine.step import Row, StepPlan, StepResult
from inference_service.messages import Finish, Load, Output, Submit, TokenLogprobs


@dataclass(slots=True)
class Scheduled:
    """A planned step and the request of each of its rows."""

    plan: StepPlan
    requests: list[Request]


class Scheduler:
    """Owns the requests: `waiting` in order of arrival, `running` in order of admission."""

    def __init__(self, batch: Batch, pages: KvPages) -> None:
        self.max_step_tokens = batch.step_tokens
        self.max_prefill_tokens = batch.prefill_tokens
        self.pages = pages
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self._requests: dict[tuple[bytes, int], Request] = {}
        self._free_slots = list(range(batch.max_requests - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def load(self) -> Load:
        return Load(len(self.running), len(self.waiting), self.pages.used, self.pages.cached)

    def submit(self, submit: Submit, origin: bytes = b"") -> None:
        """Queue a request."""
        request = Request(submit, origin)
        self._requests[origin, submit.key] = request
        self.waiting.append(request)

    def abort(self, key: int, origin: bytes = b"") -> None:
        """Drop a request and all it holds. One that is unknown has ended already."""
        request = self._requests.get((origin, key))
        if request:
            self._drop(request)

    def expire(self, now_ns: int) -> list[tuple[Request, Output]]:
        """Drop the requests whose deadline has passed, waiting or running."""
        late = [r for r in self._requests.values() if 0 < r.submit.deadline_ns <= now_ns]
        for request in late:
            self._drop(request)
        return [(r, self._output(r, [], Finish("deadline", preemptions=r.preemptions))) for r in late]

    # --- planning ---

    def schedule(self, now_ns: int) -> Scheduled | None:
        """Plan the next step, or None where there is nothing to compute (or all that there is waits for a step in flight)."""
        preemptions = self.preemptions
        decodes = [(request, self._decode_row(request)) for request in self._growing_decodes()]
        budget = self.max_step_tokens - len(decodes)
        if decodes:
            budget = min(budget, self.max_prefill_tokens)
        prefills = [request for request in self.running if not request.decodes]
        chunks = list(self._prefill_chunks(prefills, budget))
        if self.preemptions == preemptions:
            budget -= sum(row.length for _, row in chunks)
            chunks += self._prefill_chunks(self._admissions(), budget)
        planned = decodes + chunks
        if not planned:
            return None
        for request, _ in planned:
            request.scheduled_ns = request.scheduled_ns or now_ns
        return Scheduled(StepPlan([row for _, row in planned]), [request for request, _ in planned])

    def _growing_decodes(self) -> list[Request]:
        """The requests that decode in this step, each with a page for its next token; some may be preempted to make that so."""
        for request in list(self.running):
            while self._wants_decode(request) and len(request.pages) * self.pages.page_size <= request.computed:
                if self.pages.available:
                    request.pages += self.pages.allocate(1)
                else:
                    self._preempt(self.running[-1])
        return [request for request in self.running if self._wants_decode(request)]

    def _wants_decode(self, request: Request) -> bool:
        return request.decodes and not request.is_complete

    def _decode_row(self, request: Request) -> Row:
        row = self._row(request, [], 1, samples=True)
        request.in_flight += 1
        return row

    def _prefill_chunks(self, requests: list[Request] | Iterator[Request], budget: int) -> Iterator[tuple[Request, Row]]:
        """Chunks of the requests' uncomputed tokens until the budget is spent. Asks for the next request only while some is left."""
        candidates = iter(requests)
        while budget > 0 and (request := next(candidates, None)):
            length = min(budget, request.length - request.computed)
            ids = request.tokens[request.computed : request.computed + length]
            last = request.computed + length == len(request.tokens)
            row = self._row(request, ids, length, samples=last)
            if last:
                request.decodes = True
                request.in_flight += 1
            budget -= length
            yield request, row

    def _row(self, request: Request, ids: list[int], length: int, samples: bool) -> Row:
        submit = request.submit
        banned = submit.stop_token_ids if samples and request.output_length < submit.min_tokens else []
        row = Row(request.slot, request.computed, length, ids, request.pages, samples, submit.sampling, submit.logprobs, banned)
        request.computed += length
        return row

    def _admissions(self) -> Iterator[Request]:
        """Move waiting requests to running, in order, as long as a slot and pages for the whole sequence are there.

        Beyond those, a page for each running request stays free: else a new request would soon be preempted for the growth of old ones.
        """
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            # A preempted request whose last token is still in flight cannot be computed again before that token is known.
            if request.in_flight:
                return
            nodes = self.pages.match(request.tokens)
            missing = self.pages.pages_for(len(request.tokens) + 1) - len(nodes)
            reserve = len(self.running)
            if missing + reserve > self.pages.count_available_after(nodes):
                return
            self.waiting.popleft()
            self._admit(request, [node.page for node in nodes], missing)
            request.node = nodes[-1] if nodes else self.pages.tree.root
            yield request

    def _admit(self, request: Request, cached: list[int], missing: int) -> None:
        self.pages.hold(cached)
        request.pages = cached + self.pages.allocate(missing)
        request.published = len(cached)
        request.computed = len(cached) * self.pages.page_size
        if not request.scheduled_ns:
            request.cached_tokens = request.computed
        request.slot = self._free_slots.pop()
        self.running.append(request)

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages; it will be computed again, first of all that wait. Published pages may survive in the cache."""
        self._leave_running(request)
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    # --- results ---

    def update(self, step: Scheduled, result: StepResult) -> list[tuple[Request, Output]]:
        """Take in the ids that a step drew: what to tell each request's front end. Requests that have ended meanwhile are passed over."""
        outputs = []
        drawn = iter(zip(result.token_ids, result.logprobs, strict=True))
        for request, row in zip(step.requests, step.plan.rows, strict=True):
            token_id, logprobs = next(drawn) if row.samples else (None, None)
            if token_id is not None:
                request.in_flight -= 1
            if request.done:
                continue
            finish = None
            if token_id is not None:
                finish = self._append(request, token_id)
            self._publish(request)
            ids = [] if token_id is None or (finish and finish.reason == "stop") else [token_id]
            if ids or finish or not request.reported:
                outputs.append((request, self._output(request, ids, finish, [logprobs] if ids and logprobs else None)))
            if finish:
                self._drop(request)
        return outputs

    def _append(self, request: Request, token_id: int) -> Finish | None:
        request.tokens.append(token_id)
        if token_id in request.stop_ids:
            return Finish("stop", token_id, request.preemptions)
        if len(request.tokens) - request.prompt_tokens >= request.submit.max_tokens:
            return Finish("length", preemptions=request.preemptions)
        return None

    def _publish(self, request: Request) -> None:
        """Enter the request's full pages in the prefix cache: those whose tokens the host knows and whose step has run or is in line."""
        if not self.pages.prefix or request.node is None:
            return
        size = self.pages.page_size
        for place in range(request.published, min(request.computed, len(request.tokens)) // size):
            key = tuple(request.tokens[place * size : (place + 1) * size])
            request.node = self.pages.publish(request.node, key, request.pages[place])
            request.pages[place] = request.node.page
            request.published += 1

    def _output(self, request: Request, ids: list[int], finish: Finish | None, logprobs: list[TokenLogprobs] | None = None) -> Output:
        if request.reported or not request.scheduled_ns:
            return Output(request.submit.key, ids, logprobs, finish=finish)
        request.reported = True
        return Output(request.submit.key, ids, logprobs, request.scheduled_ns, request.cached_tokens, finish)

    # --- leaving ---

    def _drop(self, request: Request) -> None:
        """Forget a request. Steps in flight may still write its pages; whoever gets them next is computed after those steps."""
        request.done = True
        del self._requests[request.origin, request.submit.key]
        if request.slot >= 0:
            self._leave_running(request)
        else:
            self.waiting.remove(request)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot, request.node = [], -1, None
        request.published = request.computed = 0
        request.decodes = False

    def check_invariants(self) -> None:
        """Assert what must hold between steps. For tests and debugging."""
        self.pages.check_invariants(request.pages for request in self._requests.values())
        assert set(map(id, self._requests.values())) == set(map(id, [*self.running, *self.waiting]))
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots) == list(range(len(slots))), "a slot is lost or taken twice"
        for request in self.running:
            assert len(request.pages) * self.pages.page_size >= request.computed
