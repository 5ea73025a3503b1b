"""What is measured, and exactly how; the same for every target.

- TTFT: from the request's sending to the receipt of the first message that brings a token.
- ITL: the gap between two such messages that follow each other. One sample a gap, not divided among the tokens of a message: it is
  what a reader waits, and a stall must not look like many short gaps.
- TPOT: (last receipt - first receipt) / (output tokens - 1), one sample a request; none where all tokens came in one message.
- End to end: from sending to the end of the stream.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec

from loadgen._histogram import Histogram
from loadgen._target import ErrorClass, Observation

_LEAST_USAGE_NS = 500_000_000
"""A shorter time says little about how busy a process is."""


class Errors(msgspec.Struct):
    """Failed requests of one class."""

    count: int
    example: str
    """What the first of them said."""


class Measures(msgspec.Struct):
    """Sums over requests, in nanoseconds. Merging the measures of processes gives those of one process that had sent all requests."""

    began_unix_ns: int = 0
    """When the window opened: requests may be sent from here on. 0: nothing measured."""
    ended_unix_ns: int = 0
    completed: int = 0
    cut_off: int = 0
    """Still streaming when the run ended, and cancelled: neither completed nor failed."""
    errors: dict[ErrorClass, Errors] = {}
    in_flight_ns: int = 0
    """Time that requests were in flight within the window, summed: divided by the window, the mean concurrency."""
    input_tokens: int = 0
    """Of prompts whose first token came within the window."""
    cached_tokens: int = 0
    output_tokens: int = 0
    """Every token received within the window, whatever became of its request."""
    ttft: Histogram = msgspec.field(default_factory=Histogram)
    tpot: Histogram = msgspec.field(default_factory=Histogram)
    itl: Histogram = msgspec.field(default_factory=Histogram)
    e2e: Histogram = msgspec.field(default_factory=Histogram)
    receive_lag: Histogram = msgspec.field(default_factory=Histogram)
    """How late the loops of the processes are: what a message may have waited before it was seen."""
    wall_ns: int = 0
    """Time that the processes ran, summed."""
    cpu_ns: int = 0
    busiest_cpu: float = 0.0
    """The largest share of a core that a process used between two of its reports."""

    def add(self, observation: Observation, since_ns: int = 0) -> None:
        """Count one request. `since_ns` is when the window opened, in the observation's clock: what came before it is left out.

        Latencies are those of completed requests sent in the window only: a failure must not look fast, nor warm-up slow.
        """
        arrivals = observation.arrivals
        self.in_flight_ns += observation.ended_ns - max(observation.sent_ns, since_ns)
        self.output_tokens += sum(tokens for received_ns, tokens in arrivals if received_ns >= since_ns)
        if arrivals and arrivals[0][0] >= since_ns:
            self.input_tokens += observation.input_tokens
            self.cached_tokens += observation.cached_tokens
        failure = observation.failure
        if observation.cut_off:
            self.cut_off += 1
        elif failure:
            self._add_error(failure.kind, 1, f"{failure.code}: {failure.message}")
        else:
            self.completed += 1
            if observation.sent_ns >= since_ns:
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
        for name in ("completed", "cut_off", "in_flight_ns", "input_tokens", "cached_tokens", "output_tokens", "wall_ns", "cpu_ns"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for kind, errors in other.errors.items():
            self._add_error(kind, errors.count, errors.example)
        self.ttft.merge(other.ttft)
        self.tpot.merge(other.tpot)
        self.itl.merge(other.itl)
        self.e2e.merge(other.e2e)
        self.receive_lag.merge(other.receive_lag)
        self.busiest_cpu = max(self.busiest_cpu, other.busiest_cpu)

    @property
    def failed(self) -> int:
        return sum(errors.count for errors in self.errors.values())

    @property
    def duration_s(self) -> float:
        return max(self.ended_unix_ns - self.began_unix_ns, 0) / 1e9

    def _add_latencies(self, observation: Observation) -> None:
        self.e2e.add(observation.ended_ns - observation.sent_ns)
        arrivals = observation.arrivals
        if not arrivals:
            return
        (first_ns, _), (last_ns, _) = arrivals[0], arrivals[-1]
        self.ttft.add(first_ns - observation.sent_ns)
        for (before_ns, _), (after_ns, _) in pairwise(arrivals):
            self.itl.add(after_ns - before_ns)
        if len(arrivals) > 1:
            self.tpot.add((last_ns - first_ns) // (observation.output_tokens - 1))

    def _add_error(self, kind: ErrorClass, count: int, example: str) -> None:
        errors = self.errors.setdefault(kind, Errors(0, example))
        errors.count += count
