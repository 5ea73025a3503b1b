"""Which requests are taken, so that what is taken can be answered in time and in memory. The others are refused at once, with a reason,
the figures behind it and when to try again.

What can be said before the prompt is tokenized is said then: refusing must stay cheap when there is most to refuse. Every front-end
process counts its own requests; of several each admits as much as the only one would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import grpc

from inference_service.config import Config
from inference_service.messages import Load, Ready, Step, Submit
from inference_service.rpc.client_limits import Client
from inference_service.rpc.errors import RpcError
from inference_service.rpc.estimator import Estimator
from inference_service.rpc.load_meter import LoadMeter

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
UNKNOWN_RETRY_S = 1.0
"""Where no request has ended lately, by which it could be told when there is room."""
SAFETY = 2.0
"""A deadline is beyond reach if the first token is expected in more than so many times what is left of it."""
MARGIN = 1.5
"""While others wait, it is so too if the answer's end is expected in so many times less: answers of one length end together, so that a turn
may come an answer's time later than at the average rate. An overload keeps the queue at this edge; who is late took another's turn."""
FRESH_S = 5.0
"""What was measured before the engine had nothing to do for so long says nothing of what comes now. Nor may it refuse: what keeps all
requests out would never be measured again."""
AGAIN_SHARE = 8
"""One in so many places of the queue is there in addition, for those who were refused before and do as they were told."""


@dataclass(eq=False, slots=True)
class Ticket:
    """What a request asks for, and its part of what is bounded."""

    choices: int = 1
    priority: int = 0
    client: Client | None = None
    deadline_s: float = inf
    """By the clock."""
    min_tokens: int = 0
    max_tokens: float = inf
    """Of each answer; infinite while not known."""
    again: bool = False
    """It was refused before."""
    keys: tuple[int, ...] = ()
    prompt_tokens: int = 0
    pages: int = 0
    begun_s: float = 0.0
    """When its turn came; 0: it has not."""


class Admission:
    """Counts what is in flight, and follows it by the engine's frames."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        queue = config.server.max_queue
        self.max_in_flight = config.batch.max_requests + queue
        self.in_flight = 0
        """Choices of all requests, those included that are being tokenized."""
        self.pages = 0
        """KV pages that the requests in flight may come to need."""
        self.waiting_tokens = 0
        """Of the prompts whose turn has not come."""
        self._limits = config.limits
        self._again = -(-queue // AGAIN_SHARE)
        self._waiting: dict[int, Ticket] = {}
        """By the key of choice 0, which computes the prompt."""
        self._paying: dict[int, Client] = {}
        """Who pays for a choice's tokens."""
        self._load = Load(0, 0, 0, 0)
        """The engine's, as last heard."""
        self._since = 0
        """Choices sent to it since."""
        self._max_requests = config.batch.max_requests
        self._chunk_tokens = config.batch.prefill_tokens
        self._estimator = Estimator(self._chunk_tokens)
        self._busy_s = 0.0
        """When the engine was last heard to have something to do."""
        self._ended = 0
        self._ends = LoadMeter(window_s=10.0)
        self._promised_s = 0.0
        """The time that the last one refused was told, if it was not too late."""
        self._clock = clock

    @contextmanager
    def request(self, ticket: Ticket) -> Iterator[Ticket]:
        """A request, from before anything is done for it to its end. Raises RpcError if it cannot be taken."""
        client, choices = ticket.client, ticket.choices
        if client:
            client.check()
        limit = self.max_in_flight + (self._again if ticket.again else 0)
        if self.in_flight + choices > limit:
            what = f"{self.in_flight} answers are in flight, of at most {limit}: {choices} more is too many"
            raise self._full("QUEUE_FULL", what, ticket.priority, limit, choices)
        self._check_deadline(ticket)
        if client:
            client.pay_requests(choices)
        self.in_flight += choices
        try:
            yield ticket
            if ticket.begun_s:
                self._estimator.answered(self._clock() - ticket.begun_s)
        finally:
            self._leave(ticket)

    def commit(self, ticket: Ticket, submits: list[Submit], ready: Ready) -> None:
        """The request is read: check what depends on its prompt, and count that. Raises RpcError."""
        first, limits = submits[0], self._limits
        tokens = len(first.token_ids)
        # Where nothing else waits, or nothing else is in flight, whatever fits alone must pass, or it never would.
        excess = self.waiting_tokens + tokens - limits.max_queued_tokens
        if limits.max_queued_tokens and self.waiting_tokens and excess > 0:
            what = f"{self.waiting_tokens} prompt tokens wait, of at most {limits.max_queued_tokens}: {tokens} more is too many"
            raise self._full(
                "TOKENS_QUEUED", what, ticket.priority, limits.max_queued_tokens, excess * len(self._waiting) / self.waiting_tokens
            )
        pages, most = pages_needed(tokens, first.max_tokens, ticket.choices, ready.page_size), int(limits.max_kv_share * ready.pages)
        excess = self.pages + pages - most
        if self.pages and excess > 0:
            what = f"requests in flight may come to need {self.pages} KV pages, of at most {most}: {pages} more is too many"
            raise self._full("KV_OVERCOMMITTED", what, ticket.priority, most, excess * self.in_flight / self.pages)
        ticket.prompt_tokens, ticket.min_tokens, ticket.max_tokens = tokens, first.min_tokens, first.max_tokens
        self._check_deadline(ticket)
        ticket.pages, ticket.keys = pages, tuple(submit.key for submit in submits)
        self.pages += pages
        self._since += ticket.choices
        self.waiting_tokens += tokens
        self._waiting[first.key] = ticket
        if ticket.client and ticket.client.has_token_limit:
            ticket.client.pay_tokens(tokens)
            self._paying.update(dict.fromkeys(ticket.keys, ticket.client))

    def _leave(self, ticket: Ticket) -> None:
        self.in_flight -= ticket.choices
        self.pages -= ticket.pages
        if ticket.begun_s:
            self._ended += ticket.choices
            self._estimator.ended(ticket.choices)
        elif ticket.keys:
            del self._waiting[ticket.keys[0]]
            self.waiting_tokens -= ticket.prompt_tokens
        for key in ticket.keys if self._paying else ():
            self._paying.pop(key, None)

    def follow(self, step: Step) -> None:
        """Take note of a frame of the engine. To be called with each, before its outputs are handed on."""
        for output in step.outputs if self._waiting or self._paying else ():
            if output.scheduled_ns and (ticket := self._waiting.pop(output.key, None)):
                ticket.begun_s = self._clock()
                self.waiting_tokens -= ticket.prompt_tokens
                self._estimator.prompt(ticket.prompt_tokens, output.cached_tokens)
            if output.token_ids and (client := self._paying.get(output.key)):
                client.pay_tokens(len(output.token_ids))
        self._load, self._since = step.load, 0
        if step.work or step.load.running or step.load.waiting:
            if self._is_idle:
                self._estimator = Estimator(self._chunk_tokens)
            self._busy_s = self._clock()
        if step.work:
            self._estimator.step(step.work, step.load.waiting)

    @property
    def _is_idle(self) -> bool:
        return self._clock() > self._busy_s + FRESH_S

    def measure(self) -> None:
        """Note how many requests have ended. To be called now and then."""
        self._ends.note(self._clock(), self._ended)

    @property
    def ended_per_s(self) -> float:
        """Answers that ended, by the second, over the last seconds."""
        return self._ends.rate()

    def first_token_s(self, priority: int = 0, prompt_tokens: int = 0) -> float | None:
        """Seconds until a request that comes now would have its first token; None: not enough was measured yet."""
        tokens = sum(ticket.prompt_tokens for ticket in self._waiting.values() if ticket.priority >= priority)
        return self._estimator.first_token_s(self._ahead(priority), tokens + prompt_tokens)

    def _ahead(self, priority: int) -> int:
        """Choices whose turn must come before that of a request that comes now: no more than the engine said that wait, or, where it had
        free slots, than do not fit into these of what was sent to it since."""
        load = self._load
        queued = load.waiting + self._since if load.waiting else max(0, self._since - (self._max_requests - load.running))
        return min(queued, sum(ticket.choices for ticket in self._waiting.values() if ticket.priority >= priority))

    def _check_deadline(self, ticket: Ticket) -> None:
        if ticket.deadline_s == inf or self._is_idle:
            return
        left_s, first_s = ticket.deadline_s - self._clock(), self.first_token_s(ticket.priority, ticket.prompt_tokens)
        if first_s is None:
            return
        answer_s = self._estimator.answer_s(ticket.min_tokens, ticket.max_tokens) or 0.0
        ends_late = answer_s and MARGIN * (first_s + answer_s) > left_s and self._ahead(ticket.priority)
        if ends_late or first_s > SAFETY * left_s:
            raise RpcError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "DEADLINE_UNREACHABLE",
                f"the first token is expected in {first_s:.3g} s, an answer takes {answer_s:.3g} s, and the deadline is in {left_s:.3g} s",
                metadata={
                    "estimated_ttft_ms": f"{first_s * 1000:.0f}",
                    "estimated_answer_ms": f"{answer_s * 1000:.0f}",
                    "deadline_ms": f"{left_s * 1000:.0f}",
                    "queue_position": str(self._position(ticket.priority)),
                },
            )

    def _position(self, priority: int) -> int:
        """How many requests that wait go before one that comes now. The few of less priority that do so by their age are left out."""
        return sum(ticket.priority >= priority for ticket in self._waiting.values())

    def _full(self, reason: str, message: str, priority: int, limit: int, places: float) -> RpcError:
        """The refusal of a request for which there is room when so many others have ended."""
        return RpcError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            reason,
            message,
            retry_s=self._retry_s(places),
            metadata={"queue_position": str(self._position(priority)), "limit": str(limit)},
        )

    def _retry_s(self, places: float) -> float:
        """When to come again: each that is refused is told a later time than the one before it, as room is made, so that they do not come
        together; but no later than when all that is in flight will have ended."""
        rate = self.ended_per_s
        if not rate:
            return UNKNOWN_RETRY_S
        now_s = self._clock()
        latest_s = now_s + max(places, self.in_flight) / rate
        self._promised_s = min(max(self._promised_s, now_s) + places / rate, latest_s)
        return min(max(self._promised_s - now_s, MIN_RETRY_S), MAX_RETRY_S)


def pages_needed(prompt_tokens: int, max_tokens: int, choices: int, page_size: int) -> int:
    """KV pages of a request whose answers become as long as they may. Its choices share the prompt's full pages."""
    each, shared = -(-(prompt_tokens + max_tokens) // page_size), prompt_tokens // page_size
    return each + (choices - 1) * (each - shared)
