"""Which levels of load a run goes through: all that the settings list, or those that a search for the highest one picks."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable

import msgspec

from inference_service.config import ConfigError
from inference_service.loadtest import Loadtest

_NEAR = 1.05
"""A search ends when the load that meets the SLO and the one that does not are so near to each other."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load."""

    number: int
    """From 0, over the run."""
    arrival: str
    concurrency: int
    """Users; 0: an open loop."""
    rate: float | None
    """Requests a second, or times a trace's own pace; None: a closed loop."""
    repeat: int

    @property
    def name(self) -> str:
        if self.rate is None:
            what = f"concurrency {self.concurrency}"
        else:
            what = f"{self.rate:g} x trace" if self.arrival == "trace" else f"{self.rate:g} requests/s"
        return f"{what} #{self.repeat + 1}" if self.repeat else what


Loads = Generator[Load, bool, None]
"""Yields the next load and is sent whether it met the SLO."""


def check(loadtest: Loadtest) -> None:
    """Raises ConfigError for settings that contradict each other."""
    closed = loadtest.arrival == "closed"
    values = loadtest.concurrency if closed else loadtest.rate
    if loadtest.search and not loadtest.slo.is_set:
        raise ConfigError("loadtest.search: needs a limit in loadtest.slo")
    if loadtest.search and min(values) == max(values):
        raise ConfigError(f"loadtest.search: needs two different levels in loadtest.{'concurrency' if closed else 'rate'}")
    if (loadtest.arrival == "trace") != bool(loadtest.trace):
        raise ConfigError("loadtest.trace: a file goes with loadtest.arrival=trace, and that with a file")
    if loadtest.stages:
        if loadtest.arrival not in ("constant", "poisson"):
            raise ConfigError(f"loadtest.stages: nothing to change with loadtest.arrival={loadtest.arrival}")
        factors = [factor for _, factor in loadtest.stages]
        # The first stage begins where the last ends.
        if not any(seconds * (before + after) for (seconds, after), before in zip(loadtest.stages, [factors[-1], *factors], strict=False)):
            raise ConfigError("loadtest.stages: they let no request through")


def loads(loadtest: Loadtest) -> Loads:
    """The levels of a run, one after the other."""
    return _search(loadtest) if loadtest.search else _sweep(loadtest)


def _sweep(loadtest: Loadtest) -> Loads:
    """All of them, then all again: what drifts in a long run shows in the repeats."""
    number = 0
    for repeat in range(loadtest.repeats):
        for value in _values(loadtest):
            yield _load(loadtest, number, value, repeat)
            number += 1


def _search(loadtest: Loadtest) -> Loads:
    """Bisection. A load meets the SLO where all its repeats do."""
    number = 0

    def meets(value: float) -> Generator[Load, bool, bool]:
        nonlocal number
        for repeat in range(loadtest.repeats):
            met = yield _load(loadtest, number, value, repeat)
            number += 1
            if not met:
                return False
        return True

    whole = loadtest.arrival == "closed"
    low, high = min(_values(loadtest)), max(_values(loadtest))
    if not (yield from meets(low)) or (yield from meets(high)):
        return
    while high / low > _NEAR and (not whole or high - low > 1):
        middle = round(math.sqrt(low * high)) if whole else float(f"{math.sqrt(low * high):.3g}")
        middle = min(max(middle, low + 1), high - 1) if whole else middle
        if (yield from meets(middle)):
            low = middle
        else:
            high = middle


def _values(loadtest: Loadtest) -> Iterable[float]:
    return loadtest.concurrency if loadtest.arrival == "closed" else loadtest.rate


def _load(loadtest: Loadtest, number: int, value: float, repeat: int) -> Load:
    closed = loadtest.arrival == "closed"
    return Load(
        number=number,
        arrival=loadtest.arrival,
        concurrency=int(value) if closed else 0,
        rate=None if closed else value,
        repeat=repeat,
    )
