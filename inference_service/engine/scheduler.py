"""Continuous batching: which tokens of which requests the next step computes.

One budget of tokens a step: first one token for every request that decodes, then prefill chunks in order of admission, then of those that
wait, by priority and arrival (waiting.py). While anything decodes, prefill is capped, so that a long prompt slows decodes by a bounded
amount instead of stalling them. What runs is preempted only where pages run out, those whose turn came last first.

Steps overlap: `schedule` plans step N + 1 while step N runs, before its sampled ids are known. A request whose answer turns out to have
ended with step N has then computed one token too many, which `update` drops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from inference_service.config import Batch
from inference_service.engine.forks import SharedPrompt, SharedPrompts
from inference_service.engine.grammars import Grammars
from inference_service.engine.in_flight import InFlight
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.requests import Request
from inference_service.engine.rows import make_row
from inference_service.engine.step import Row, StepPlan, StepResult
from inference_service.engine.waiting import RequestHeap, rank
from inference_service.messages import Finish, Load, Output, Submit, TokenLogprobs

RUSH_STEPS = 2
"""One would be full of a single long prompt, which comes no sooner to its first token by it, while all others wait longer."""


@dataclass(slots=True)
class Scheduled:
    """A planned step and the request of each of its rows."""

    plan: StepPlan
    requests: list[Request]
    planned_ns: int
    """CLOCK_MONOTONIC."""


class Scheduler:
    """Owns the requests: `waiting` in the order of their ranks, `running` in order of admission. Not yet among these are forks whose
    parents' prompts are not computed, and requests that wait for their grammars."""

    def __init__(self, batch: Batch, pages: KvPages, grammars: Grammars | None = None, rush_tokens: int = 0) -> None:
        """`grammars`: None where no request has one. `rush_tokens`: prefill tokens beside decodes while many are to be computed; 0: never
        more than else."""
        self.max_step_tokens = batch.step_tokens
        self.max_prefill_tokens = batch.prefill_tokens
        self.rush_tokens = rush_tokens or batch.prefill_tokens
        self.pages = pages
        self.waiting = RequestHeap(lambda request: request.rank)
        self.running: list[Request] = []
        self.preemptions = 0
        self.output_tokens = 0
        """Ids told to front ends so far."""
        self._requests = InFlight()
        self._grammars = grammars
        self._guided: dict[int, Request] = {}
        """Requests with a grammar, by their guides' keys."""
        self._numbers = count()
        self._deadlines = RequestHeap(lambda request: (request.submit.deadline_ns, request.rank[1]))
        self._prompts = SharedPrompts(pages)
        self._parents: list[Request] = []
        """Those with forks whose prompts the last step planned has completed."""
        self._copies: list[tuple[int, int]] = []
        """The pages to copy in the step that is being planned."""
        self._free_slots = list(range(batch.max_requests - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def load(self) -> Load:
        waiting = len(self._requests) - len(self.running)
        return Load(len(self.running), waiting, self.pages.used, self.pages.cached, self.waiting.tokens, self.output_tokens)

    @property
    def wake(self) -> int | None:
        """A file descriptor that is readable when `follow_grammars` has something to do; None: no request has a grammar."""
        return self._grammars.fileno if self._grammars else None

    def submit(self, submit: Submit, origin: bytes = b"") -> list[tuple[Request, Output]]:
        """Queue a request; a fork once its parent's prompt is computed, and one with a grammar once that is compiled.

        What to tell the front end at once: that another request of that name is in flight.
        """
        request = Request(submit, origin, rank(submit, next(self._numbers)))
        if not self._requests.add(request):
            return [(request, self._output(request, [], Finish("duplicate")))]
        if submit.deadline_ns:
            self._deadlines.push(request)
        if submit.grammar and self._grammars:
            request.parked = True
            request.guide = self._grammars.start(submit.grammar)
            self._guided[request.guide.key] = request
        else:
            self._enqueue(request)
        return []

    def _enqueue(self, request: Request) -> None:
        request.parent = self._requests.get(request.origin, request.submit.fork_of)
        if request.parent is None:
            self.waiting.push(request)
            return
        request.parent.forks.append(request)
        if request.parent.decodes:
            self._fork(request.parent)

    def abort(self, key: int, origin: bytes = b"") -> None:
        """Drop a request and all it holds. One that is unknown has ended already."""
        request = self._requests.get(origin, key)
        if request:
            self._drop(request)

    def abort_by_id(self, request_id: str) -> list[tuple[Request, Output]]:
        """Drop a client's request, and what to tell its front end."""
        requests = self._requests.named(request_id)
        for request in requests:
            self._drop(request)
        return [(request, self._output(request, [], Finish("abort"))) for request in requests]

    def abort_all(self, origin: bytes) -> None:
        """Drop all requests of a front end."""
        for request in self._requests.of(origin):
            self._drop(request)

    def expire(self, now_ns: int) -> list[tuple[Request, Output]]:
        """Drop the requests whose deadline has passed, waiting or running."""
        late = []
        while (request := self._deadlines.first) and request.submit.deadline_ns <= now_ns:
            late.append(request)
            self._drop(request)
        return [(r, self._output(r, [], Finish("deadline"))) for r in late]

    def follow_grammars(self) -> list[tuple[Request, Output]]:
        """Take in the masks that are made: requests may go on, or turn out to have ended, or to be impossible."""
        outputs = []
        for guide in self._grammars.poll() if self._grammars else ():
            request = self._guided[guide.key]
            finish = None
            if guide.error:
                finish = Finish("failed" if request.scheduled_ns else "invalid", error=guide.error)
            elif guide.ended:
                finish = Finish("stop")
            elif request.parked:
                request.parked = False
                if request.preemptions:
                    self.waiting.push(request)
                else:
                    self._enqueue(request)
            if finish:
                self._drop(request)
                outputs.append((request, self._output(request, [], finish)))
        return outputs

    # --- planning ---

    def schedule(self, now_ns: int) -> Scheduled | None:
        """Plan the next step, or None where there is nothing to compute (or all that there is waits for a step in flight)."""
        preemptions, self._copies = self.preemptions, []
        for parent in self._parents:
            if parent.forks:
                self._fork(parent)
        self._parents.clear()
        decodes = [(request, self._decode_row(request)) for request in self._growing_decodes()]
        budget = self.max_step_tokens - len(decodes)
        prefills = [request for request in self.running if not request.decodes]
        if decodes:
            budget = min(budget, self._budget_beside_decodes(prefills))
        chunks = list(self._prefill_chunks(prefills, budget))
        if self.preemptions == preemptions:
            budget -= sum(row.length for _, row in chunks)
            chunks += self._prefill_chunks(self._admissions(), budget)
        planned = decodes + chunks
        if not planned:
            return None
        for request, _ in planned:
            request.scheduled_ns = request.scheduled_ns or now_ns
        return Scheduled(StepPlan([row for _, row in planned], self._copies), [request for request, _ in planned], now_ns)

    def _budget_beside_decodes(self, prefills: list[Request]) -> int:
        """Prefill tokens that decodes are made to wait for: more where so many wait that RUSH_STEPS steps at the best rate are full."""
        backlog = self.waiting.tokens + sum(request.length - request.computed for request in prefills)
        return self.rush_tokens if backlog >= RUSH_STEPS * self.rush_tokens else self.max_prefill_tokens

    def _growing_decodes(self) -> list[Request]:
        """The requests that decode in this step, each with a page for its next token; some may be preempted to make that so."""
        decodes = [request for request in self.running if request.decodes and not request.is_complete and not request.lacks_mask]
        for request in decodes:
            while request.decodes and len(request.pages) * self.pages.page_size <= request.computed:
                if self.pages.available:
                    request.pages += self.pages.allocate(1)
                elif not self._prompts.reclaim():
                    self._preempt(max(self.running, key=lambda request: request.rank))
        # Those preempted decode no longer.
        return [request for request in decodes if request.decodes]

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
                if request.forks:
                    self._parents.append(request)
            budget -= length
            yield request, row

    def _row(self, request: Request, ids: list[int], length: int, samples: bool) -> Row:
        row = make_row(request, ids, length, samples)
        request.computed += length
        return row

    def _admissions(self) -> Iterator[Request]:
        """Move waiting requests to running, in order, as long as a slot and pages for the whole sequence are there.

        Beyond those, a page for each running request stays free: else a new request would soon be preempted for the growth of old ones.
        """
        while self._free_slots and (request := self.waiting.first):
            # A preempted request whose last token is still in flight cannot be computed again before that token is known.
            if request.in_flight:
                return
            nodes = [] if request.scores_prompt else self.pages.match(request.tokens, request.submit.cache_salt)
            known = [node.page for node in nodes]
            if request.shared and not self.pages.prefix:
                known = request.shared.pages[:-1]
            missing = self.pages.pages_for(len(request.tokens) + 1) - len(known)
            reserve = len(self.running)
            if missing + reserve > self.pages.count_available_after(nodes):
                # Pages that are held for forks must not keep back what else could run.
                if self.running or not self._prompts.reclaim():
                    return
                continue
            self.waiting.pop()
            self._admit(request, known, missing)
            request.node = nodes[-1] if nodes else self.pages.tree.root
            yield request

    def _admit(self, request: Request, known: list[int], missing: int) -> None:
        self.pages.hold(known)
        request.pages = known + self.pages.allocate(missing)
        request.published = len(known)
        request.computed = len(known) * self.pages.page_size
        if not request.scheduled_ns:
            request.cached_tokens = request.computed
        request.slot = self._free_slots.pop()
        self.running.append(request)
        if request.shared:
            self._take_over(request, request.shared)

    def _preempt(self, request: Request) -> None:
        """Take a running request's pages; it will be computed again when its turn comes. Published pages may survive in the cache."""
        self._leave_running(request)
        request.preemptions += 1
        self.preemptions += 1
        # In the queue it would hold up those who have no grammar to wait for.
        request.parked = request.lacks_mask
        if not request.parked:
            self.waiting.push(request)

    # --- forks ---

    def _fork(self, parent: Request) -> None:
        """Queue a request's forks. Where the step that completes its prompt has been launched, they share the prompt's pages."""
        forks, parent.forks = parent.forks, []
        shared = None
        if parent.decodes:
            # Now, so that the pages held are those of the prefix tree, where it has any of the prompt.
            self._publish(parent)
            shared = self._prompts.hold(parent.pages[: self.pages.pages_for(parent.prompt_tokens)], len(forks))
        for fork in forks:
            fork.parent, fork.shared = None, shared
            self.waiting.push(fork)

    def _take_over(self, fork: Request, shared: SharedPrompt) -> None:
        """Copy what the prompt's last page, if it is still held, has before the last token: only that token is left to compute."""
        if shared.pages:
            fork.computed = fork.prompt_tokens - 1
            if fork.computed % self.pages.page_size:
                self._copies.append((shared.pages[-1], fork.pages[len(shared.pages) - 1]))
        fork.shared = None
        self._prompts.leave(shared)

    # --- results ---

    def update(self, step: Scheduled, result: StepResult) -> list[tuple[Request, Output]]:
        """Take in the ids that a step drew: what to tell each request's front end. Requests that have ended meanwhile are passed over."""
        outputs = []
        drawn = iter(zip(result.token_ids, result.logprobs, strict=True))
        for place, (request, row) in enumerate(zip(step.requests, step.plan.rows, strict=True)):
            token_id, logprobs = next(drawn) if row.samples else (None, None)
            if token_id is not None:
                request.in_flight -= 1
            if request.done:
                continue
            finish = None if token_id is None else self._append(request, token_id)
            self._publish(request)
            ids = [] if token_id is None or (finish and finish.reason == "stop") else [token_id]
            scores = request.take_scores(row.start, result.prompt_logprobs[place]) if place in result.prompt_logprobs else None
            if ids or finish or scores or not request.reported:
                outputs.append((request, self._output(request, ids, finish, [logprobs] if ids and logprobs else None, scores)))
            if finish:
                self._drop(request)
            elif token_id is not None and request.guide and self._grammars:
                self._grammars.advance(request.guide, token_id)
        return outputs

    def _append(self, request: Request, token_id: int) -> Finish | None:
        request.tokens.append(token_id)
        if token_id in request.stop_ids:
            return Finish("stop", token_id)
        if len(request.tokens) >= request.max_length:
            return Finish("length")
        return None

    def _publish(self, request: Request) -> None:
        """Enter the request's full pages in the prefix cache: those whose tokens the host knows and whose step has run or is in line."""
        if not self.pages.prefix or request.node is None:
            return
        size = self.pages.page_size
        for place in range(request.published, min(request.computed, len(request.tokens)) // size):
            key = self.pages.tree.key(request.tokens, place, request.submit.cache_salt)
            request.node = self.pages.publish(request.node, key, request.pages[place])
            request.pages[place] = request.node.page
            request.published += 1

    def _output(
        self,
        request: Request,
        ids: list[int],
        finish: Finish | None,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs] | None = None,
    ) -> Output:
        key, scheduled_ns, cached_tokens = request.submit.key, 0, 0
        if not request.reported and request.scheduled_ns:
            request.reported, scheduled_ns, cached_tokens = True, request.scheduled_ns, request.cached_tokens
        self.output_tokens += len(ids)
        return Output(key, ids, logprobs, scheduled_ns, cached_tokens, finish, prompt_logprobs, request.preemptions)

    # --- leaving ---

    def _drop(self, request: Request) -> None:
        """Forget a request. Steps in flight may still write its pages; whoever gets them next is computed after those steps."""
        request.done = True
        self._requests.remove(request)
        if request.submit.deadline_ns:
            self._deadlines.discard(request)
        if request.guide and self._grammars:
            self._grammars.end(request.guide)
            del self._guided[request.guide.key]
        if request.forks:
            self._fork(request)
        if request.parked:
            return
        if request.slot >= 0:
            self._leave_running(request)
        elif request.parent:
            request.parent.forks.remove(request)
        else:
            self.waiting.discard(request)
            if request.shared:
                self._prompts.leave(request.shared)

    def _leave_running(self, request: Request) -> None:
        self.running.remove(request)
        self.pages.release(request.pages)
        self._free_slots.append(request.slot)
        request.pages, request.slot, request.node = [], -1, None
        request.published = request.computed = 0
        request.decodes = False

    def check_invariants(self) -> None:
        """Assert what must hold between steps. For tests and debugging."""
        requests = list(self._requests)
        self.pages.check_invariants([*(request.pages for request in requests), *(shared.pages for shared in self._prompts)])
        forks = [fork for parent in requests for fork in parent.forks]
        parked = [request for request in requests if request.parked]
        places = [*self.running, *self.waiting, *forks, *parked]
        assert sorted(map(id, requests)) == sorted(map(id, places)), "a request is lost, or in two places"
        assert len(self.waiting) == len(list(self.waiting)), "the queue counts wrong"
        assert self.waiting.tokens == sum(request.prefill for request in self.waiting), "the queue counts its tokens wrong"
        for shared in self._prompts:
            assert shared.forks == sum(request.shared is shared for request in self.waiting) > 0, "a prompt is held for nobody"
        slots = [request.slot for request in self.running] + self._free_slots
        assert sorted(slots) == list(range(len(slots))), "a slot is lost or taken twice"
        for request in self.running:
            assert len(request.pages) * self.pages.page_size >= request.computed
