"""When the requests of an open loop are due, and which process sends which of them.

Every process makes the whole schedule from the seed and takes its share, so the shares together are the schedule whatever the number of
processes. Random arrivals are dealt out at random: a share of a Poisson process dealt so is one itself, and the shares are independent,
so that the load stays Poisson even where the processes' clocks differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import count, cycle

Stage = tuple[float, float]
"""(seconds, factor): the factor goes linearly to that value in so long."""


def evenly() -> Iterator[float]:
    """0, 1, 2, ...: arrivals at a rate of one a second."""
    yield from map(float, count())


def at_random(seed: str) -> Iterator[float]:
    """A Poisson process of one a second."""
    noise, at_s = random.Random(seed), 0.0
    while True:
        at_s += noise.expovariate(1.0)
        yield at_s


def at_rate(arrivals: Iterator[float], rate: float, stages: Sequence[Stage] = ()) -> Iterator[float]:
    """The seconds at which arrivals of one a second come at `rate` times the stages' factor.

    Each arrival is put where the rate's integral reaches it, so evenly spaced ones stay even in it and a Poisson process stays Poisson.
    """
    if not stages:
        yield from (at_s / rate for at_s in arrivals)
        return
    pieces = cycle(_pieces(rate, stages))
    began_s = done = 0.0
    seconds, first, last = next(pieces)
    for wanted in arrivals:
        while wanted - done > (area := seconds * (first + last) / 2):
            done, began_s = done + area, began_s + seconds
            seconds, first, last = next(pieces)
        yield began_s + _seconds_to(wanted - done, seconds, first, last)


def share(arrivals: Iterator[float], process: int, processes: int, seed: str | None = None) -> Iterator[tuple[int, float]]:
    """(number, seconds) of one process's arrivals: dealt out at random by `seed`, else in turn."""
    dealer = random.Random(seed)
    for number, at_s in enumerate(arrivals):
        if (dealer.randrange(processes) if seed is not None else number % processes) == process:
            yield number, at_s


def _pieces(rate: float, stages: Sequence[Stage]) -> list[tuple[float, float, float]]:
    """(seconds, rate at its beginning, rate at its end) of each; the first begins where the last ends."""
    factors = [factor for _, factor in stages]
    return [(seconds, rate * before, rate * after) for (seconds, after), before in zip(stages, [factors[-1], *factors], strict=False)]


def _seconds_to(area: float, seconds: float, first: float, last: float) -> float:
    """When the integral of a rate that goes from `first` to `last` in `seconds` reaches `area`."""
    if not area:
        return 0.0
    slope = (last - first) / seconds
    # The root of slope/2 t^2 + first t = area, written so that it does not cancel out where the slope is small.
    return min(seconds, 2 * area / (first + math.sqrt(max(0.0, first * first + 2 * slope * area))))
