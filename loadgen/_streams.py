"""The requests that one process has in flight, whether users send them or a schedule does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import gevent  # type: ignore[import-untyped]
from gevent import monkey
from gevent.event import Event  # type: ignore[import-untyped]
from gevent.pool import Group  # type: ignore[import-untyped]

from loadgen._target import ErrorClass, Failure, Observation, Request, Target
from loadgen._workload import Workload

log = logging.getLogger(__name__)

_LOOK_UP_S = 0.1
"""How often a user who may not send looks whether Locust wants it to stop."""
_FAILURE_PAUSE_S = 0.1
"""A user waits so long after a failure: a server that refuses at once must not be hammered by a busy loop."""

_TIMER_NS = 2_000_000
"""The loop's timers count in whole milliseconds, so the last of a wait is slept in a thread, which is woken in time."""
_WAKE_NS = 900_000
"""Of that, what the thread and the loop may take to wake; what is left is spent in turns of the loop."""
_sleep_in_thread = monkey.get_original("time", "sleep")

Observed = Callable[[Request, Observation], None]
Schedule = Iterator[tuple[Request, int]]
"""(request, when it is due by time.monotonic_ns()), in the order of the times."""


class Streams:
    """Each request runs in a greenlet of its own, so that it can be cancelled whoever waits for it.

    `observed` is called once for each request that was sent, also where it is cancelled.
    """

    def __init__(self, target: Target, workload: Workload, observed: Observed) -> None:
        self._target = target
        self._workload = workload
        self._observed = observed
        self._running = Group()
        self._open = False
        self._users = Event()
        self._dispatcher: gevent.Greenlet | None = None
        self.most = 0
        """The most that ran at once since this was last set to 0."""

    def admit(self) -> None:
        """Let users send."""
        self._open = True
        self._users.set()

    def dispatch(self, schedule: Schedule, exhausted: Callable[[], None]) -> None:
        """Send what the schedule says, each request when it is due, whatever became of those before; tell when there is no more."""
        self._open = True
        self._dispatcher = gevent.spawn(self._dispatch, schedule, exhausted)

    def serve_user(self) -> None:
        """One conversation for a user who waits for it; nothing while none may be sent."""
        if not self._users.wait(_LOOK_UP_S):
            return
        stream = self._start(self._workload.next(), 0)
        try:
            stream.join()
        finally:
            # Where Locust has killed the user, this is what cancels the request.
            stream.kill()
        if stream.value:
            gevent.sleep(_FAILURE_PAUSE_S)

    def close(self) -> None:
        """Send nothing more."""
        self._open = False
        self._users.clear()
        if self._dispatcher is not None:
            self._dispatcher.kill()
            self._dispatcher = None

    def drain(self, seconds: float) -> None:
        """Wait for what is in flight, then cancel the rest."""
        self._running.join(seconds)
        self._running.kill()

    def _start(self, request: Request, due_ns: int) -> gevent.Greenlet:
        stream = self._running.spawn(self._converse, request, due_ns)
        self.most = max(self.most, len(self._running))
        return stream

    def _converse(self, first: Request, due_ns: int) -> bool:
        """The conversation's turns, as long as turns may be sent; whether the last one failed."""
        observation = self._send(first, due_ns)
        request = self._workload.next_turn(first, observation)
        while request is not None and self._open:
            observation = self._send(request, 0)
            request = self._workload.next_turn(request, observation)
        return observation.failure is not None

    def _send(self, request: Request, due_ns: int) -> Observation:
        observation = Observation(scheduled_ns=due_ns)
        try:
            self._target.generate(request, observation)
        except Exception as error:
            # What the target did not foresee must not pass for a request that was cut off. (A kill is no Exception.)
            log.exception("request %d", request.index)
            observation.failure = Failure(ErrorClass.SERVER, type(error).__name__, str(error))
            observation.cut_off = False
        finally:
            self._observed(request, observation)
        return observation

    def _dispatch(self, schedule: Schedule, exhausted: Callable[[], None]) -> None:
        for request, due_ns in schedule:
            _sleep_until(due_ns)
            self._start(request, due_ns)
            # It is sent before the next one is made, which takes a while for a long prompt; and where all are late, the loop does all else.
            gevent.sleep(0)
        exhausted()


def _sleep_until(due_ns: int) -> None:
    """Sleep to a time by time.monotonic_ns()."""
    while (left_ns := due_ns - time.monotonic_ns()) > 0:
        if left_ns > _TIMER_NS:
            # The loop counts from when it last looked at the clock.
            gevent.get_hub().loop.update_now()
            gevent.sleep((left_ns - _TIMER_NS) / 1e9)
        elif left_ns > _WAKE_NS:
            gevent.get_hub().threadpool.apply(_sleep_in_thread, ((left_ns - _WAKE_NS) / 1e9,))
        else:
            gevent.sleep(0)
