"""The order in which requests get their turn, and the queue that keeps it however many wait.

Each point of priority is worth AGING_S seconds of waiting: a request goes before all that are less urgent and came less than that long
before it. So the order of two requests never changes while they wait, a larger priority goes first among requests of one time, and nobody
starves: a request waits at most AGING_S for each point that it has less than those that keep coming.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from inference_service.engine.requests import Request
from inference_service.messages import Submit

AGING_S = 10
"""Seconds in the queue that weigh as much as a point of priority."""


def rank(submit: Submit, number: int) -> tuple[int, int]:
    """A request's place in the order, smallest first: when it would have come with priority 0, then its number."""
    return submit.arrival_ns - submit.priority * AGING_S * 1_000_000_000, number


class RequestHeap:
    """Requests by a key, smallest first, each of which may leave from wherever it is: every operation takes logarithmic time.

    A request that is `done` stays inside until it comes to the top, or until half of all are such: who makes it so says `discard`.
    """

    def __init__(self, key: Callable[[Request], tuple[int, int]]) -> None:
        """`key` must differ between any two requests, and never change."""
        self._key = key
        self.tokens = 0
        """To compute before those inside decode, as far as known; the prefix cache may have some."""
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._done = 0

    def __len__(self) -> int:
        return len(self._heap) - self._done

    def __iter__(self) -> Iterator[Request]:
        """All, in no order."""
        return (request for _, request in self._heap if not request.done)

    @property
    def first(self) -> Request | None:
        """The one whose turn it is; None: there is none."""
        while self._heap and self._heap[0][1].done:
            heapq.heappop(self._heap)
            self._done -= 1
        return self._heap[0][1] if self._heap else None

    def push(self, request: Request) -> None:
        self.tokens += request.prefill
        heapq.heappush(self._heap, (self._key(request), request))

    def pop(self) -> Request:
        """Take the first out, which must be there."""
        request = self.first
        assert request is not None
        heapq.heappop(self._heap)
        self.tokens -= request.prefill
        return request

    def discard(self, request: Request) -> None:
        """Take note that one of the requests inside is done."""
        self.tokens -= request.prefill
        self._done += 1
        if 2 * self._done > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[1].done]
            heapq.heapify(self._heap)
            self._done = 0
