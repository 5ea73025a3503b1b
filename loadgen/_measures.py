"""What is measured, and exactly how; the same for every target.

- TTFT: from the request's sending to the receipt of the first message that brings a token.
- ITL: the gap between two such messages that follow each other. One sample a gap, not divided among the tokens of a message: it is
  what a reader waits, and a stall must not look like many short gaps.
- TPOT: (last receipt - first receipt) / (output tokens - 1), one sample a request; none where all tokens came in one message.
- End to end: from sending to the end of the stream.
- In an open loop TTFT and end to end once more, from when the request was due: what it waited for the load generator is in them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from inference_service.loadtest import Slo
from loadgen._histogram import Histogram
from loadgen._result import Errors
from loadgen._target import ErrorClass, Observation

_LEAST_USAGE_NS = 500_000_000
"""A shorter time says little about how busy a process is."""
_NEVER_NS = 1 << 62
_SUMS = (
    *("completed", "completed_inside", "cut_off", "good", "good_inside", "judged", "in_flight_ns"),
    *("input_tokens", "cached_tokens", "output_tokens", "messages", "wall_ns", "cpu_ns"),
)
_HISTOGRAMS = (
    *("ttft", "tpot", "itl", "e2e", "scheduled_ttft", "scheduled_e2e", "schedule_lag"),
    *("queue", "server_ttft", "user_pace", "receive_lag"),
)


@dataclass(slots=True)
class Window:
    """The time that counts, in the observations' clock, and what makes a request a good one."""

    since_ns: int = 0
    until_ns: int = _NEVER_NS
    slo: Slo = field(default_factory=Slo)

    def holds(self, time_ns: int) -> bool:
        return self.since_ns <= time_ns < self.until_ns


class Second(msgspec.Struct, array_like=True):
    """Sums over one second of the window."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    ttft_count: int = 0
    ttft_ns: int = 0
    itl_count: int = 0
    itl_ns: int = 0
    itl_max_ns: int = 0

    def merge(self, other: Second) -> None:
        for name in self.__struct_fields__[:-1]:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.itl_max_ns = max(self.itl_max_ns, other.itl_max_ns)


class Measures(msgspec.Struct):
    """Sums over requests, in nanoseconds. Merging the measures of processes gives those of one process that had sent all requests.

    A request belongs to the window in which it was due, or sent: its latencies and whether it was good count there, also where it ends
    while the level drains. Tokens and ends count when they come, so that rates are those of the window alone.
    """

    began_unix_ns: int = 0
    """When the window opened: requests may be sent from here on. 0: nothing measured."""
    ended_unix_ns: int = 0
    completed: int = 0
    completed_inside: int = 0
    """Of these, those that ended within the window."""
    cut_off: int = 0
    """Still streaming when the run ended, and cancelled: neither completed nor failed."""
    good: int = 0
    good_inside: int = 0
    judged: int = 0
    """Sent in the window, and completed, failed, or cut off when they were beyond a limit already: good or not."""
    errors: dict[ErrorClass, Errors] = {}
    in_flight_ns: int = 0
    """Time that requests were in flight within the window, summed: divided by the window, the mean concurrency."""
    input_tokens: int = 0
    """Of prompts whose first token came within the window."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Every token received within the window, whatever became of its request."""
    messages: int = 0
    """With tokens, received within the window."""
    ttft: Histogram = msgspec.field(default_factory=Histogram)
    tpot: Histogram = msgspec.field(default_factory=Histogram)
    itl: Histogram = msgspec.field(default_factory=Histogram)
    e2e: Histogram = msgspec.field(default_factory=Histogram)
    scheduled_ttft: Histogram = msgspec.field(default_factory=Histogram)
    scheduled_e2e: Histogram = msgspec.field(default_factory=Histogram)
    schedule_lag: Histogram = msgspec.field(default_factory=Histogram)
    """How much later than due requests were sent."""
    queue: Histogram = msgspec.field(default_factory=Histogram)
    server_ttft: Histogram = msgspec.field(default_factory=Histogram)
    user_pace: Histogram = msgspec.field(default_factory=Histogram)
    """Thousandths of a token a second."""
    receive_lag: Histogram = msgspec.field(default_factory=Histogram)
    """How late the loops of the processes are: what a message may have waited before it was seen."""
    seconds: dict[int, Second] = {}
    streams: int = 0
    """The most that one process had open at once."""
    wall_ns: int = 0
    """Time that the processes ran, summed."""
    cpu_ns: int = 0
    busiest_cpu: float = 0.0
    """The largest share of a core that a process used between two of its reports."""

    def add(self, observation: Observation, window: Window) -> None:
        """Count one request.

        Latencies are those of completed requests only: a failure must not look fast, nor warm-up slow.
        """
        inside = window.holds(observation.ended_ns)
        belongs = window.holds(observation.began_ns)
        self.in_flight_ns += max(0, min(observation.ended_ns, window.until_ns) - max(observation.sent_ns, window.since_ns))
        self._add_arrivals(observation, window)
        if belongs:
            self._second(observation.began_ns, window).sent += 1
        failure = observation.failure
        if not (inside or belongs):
            return
        if belongs and observation.scheduled_ns:
            self.schedule_lag.add(max(0, observation.sent_ns - observation.scheduled_ns))
        if observation.cut_off:
            self.cut_off += 1
            self.judged += belongs and _is_overdue(observation, window.slo)
        elif failure:
            self._add_error(failure.kind, 1, f"{failure.code}: {failure.message}")
            self.judged += belongs
            if inside:
                self._second(observation.ended_ns, window).failed += 1
        else:
            good = _is_good(observation, window.slo)
            self.completed += 1
            self.judged += belongs
            self.good += good and belongs
            if inside:
                self.completed_inside += 1
                self.good_inside += good
                self._second(observation.ended_ns, window).completed += 1
            if belongs:
                self._add_latencies(observation)

    def add_usage(self, wall_ns: int, cpu_ns: int) -> None:
        """Count what a process used since its last report."""
        self.wall_ns += wall_ns
        self.cpu_ns += cpu_ns
        if wall_ns >= _LEAST_USAGE_NS:
            self.busiest_cpu = max(self.busiest_cpu, cpu_ns / wall_ns)

    def merge(self, other: Measures) -> None:
        if other.began_unix_ns:
            self.began_unix_ns = min(self.began_unix_ns or other.began_unix_ns, other.began_unix_ns)
        self.ended_unix_ns = max(self.ended_unix_ns, other.ended_unix_ns)
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            getattr(self, name).merge(getattr(other, name))
        for kind, errors in other.errors.items():
            self._add_error(kind, errors.count, errors.example)
        for number, second in other.seconds.items():
            self.seconds.setdefault(number, Second()).merge(second)
        self.streams = max(self.streams, other.streams)
        self.busiest_cpu = max(self.busiest_cpu, other.busiest_cpu)

    @property
    def failed(self) -> int:
        return sum(errors.count for errors in self.errors.values())

    @property
    def duration_s(self) -> float:
        return max(self.ended_unix_ns - self.began_unix_ns, 0) / 1e9

    def _add_arrivals(self, observation: Observation, window: Window) -> None:
        """What came within the window, by its second."""
        since_ns, until_ns = window.since_ns, window.until_ns
        before_ns, second, second_ends_ns = 0, Second(), 0
        for received_ns, tokens in observation.arrivals:
            if since_ns <= received_ns < until_ns:
                if received_ns >= second_ends_ns:
                    number = (received_ns - since_ns) // 1_000_000_000
                    second = self.seconds.setdefault(number, Second())
                    second_ends_ns = since_ns + (number + 1) * 1_000_000_000
                self.messages += 1
                self.output_tokens += tokens
                second.output_tokens += tokens
                if before_ns:
                    gap_ns = received_ns - before_ns
                    second.itl_count += 1
                    second.itl_ns += gap_ns
                    if gap_ns > second.itl_max_ns:
                        second.itl_max_ns = gap_ns
                else:
                    second.ttft_count += 1
                    second.ttft_ns += received_ns - observation.sent_ns
                    self.input_tokens += observation.input_tokens
                    self.cached_tokens += observation.cached_tokens
            before_ns = received_ns

    def _add_latencies(self, observation: Observation) -> None:
        sent_ns, due_ns, arrivals = observation.sent_ns, observation.scheduled_ns, observation.arrivals
        self.e2e.add(observation.ended_ns - sent_ns)
        if due_ns:
            self.scheduled_e2e.add(observation.ended_ns - due_ns)
        if observation.server_ttft_ns:
            self.queue.add(observation.queue_ns)
            self.server_ttft.add(observation.server_ttft_ns)
        if not arrivals:
            return
        first_ns = arrivals[0][0]
        self.ttft.add(first_ns - sent_ns)
        if due_ns:
            self.scheduled_ttft.add(first_ns - due_ns)
        self.itl.extend([after[0] - before[0] for before, after in pairwise(arrivals)])
        if (tpot_ns := _tpot_ns(observation)) is not None:
            self.tpot.add(tpot_ns)
            self.user_pace.add(1_000_000_000_000 // max(1, tpot_ns))

    def _second(self, time_ns: int, window: Window) -> Second:
        return self.seconds.setdefault((time_ns - window.since_ns) // 1_000_000_000, Second())

    def _add_error(self, kind: ErrorClass, count: int, example: str) -> None:
        errors = self.errors.setdefault(kind, Errors(0, example))
        errors.count += count


def _tpot_ns(observation: Observation) -> int | None:
    arrivals = observation.arrivals
    if len(arrivals) < 2:
        return None
    return (arrivals[-1][0] - arrivals[0][0]) // (observation.output_tokens - 1)


def _is_good(observation: Observation, slo: Slo) -> bool:
    """Whether a completed request kept every limit. In an open loop its time runs from when it was due, as its user's does."""
    began_ns = observation.began_ns
    if slo.ttft_ms and (not observation.arrivals or observation.arrivals[0][0] - began_ns > slo.ttft_ms * 1e6):
        return False
    if slo.tpot_ms and (_tpot_ns(observation) or 0) > slo.tpot_ms * 1e6:
        return False
    return not slo.e2e_ms or observation.ended_ns - began_ns <= slo.e2e_ms * 1e6


def _is_overdue(observation: Observation, slo: Slo) -> bool:
    """Whether a request that was cut off was beyond a limit by then, whatever would have become of it."""
    waited_ms = (observation.ended_ns - observation.began_ns) / 1e6
    first_ms = (observation.arrivals[0][0] - observation.began_ns) / 1e6 if observation.arrivals else waited_ms
    return bool((slo.ttft_ms and first_ms > slo.ttft_ms) or (slo.e2e_ms and waited_ms > slo.e2e_ms))
