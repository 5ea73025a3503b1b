"""Means and ratios of repeated measurements, with their 95 % confidence intervals (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from loadgen._figures import interval, t_95


@dataclass(frozen=True)
class Estimate:
    """A value, and the interval that holds the true one with 95 % confidence; None of `low` and `high` with too few samples."""

    value: float
    low: float | None
    high: float | None
    samples: int
    """Of a ratio, the fewer of the two."""


def mean_of(samples: Sequence[float]) -> Estimate:
    """Of at least one sample."""
    if len(samples) < 2:
        return Estimate(samples[0], None, None, 1)
    found = interval(samples)
    return Estimate(found.mean, found.low, found.high, found.samples)


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> Estimate:
    """The geometric mean of a / b over measurements that were made side by side, all positive; what slows both alike cancels."""
    found = mean_of([math.log(a / b) for a, b in pairs])
    return _exp(found.value, None if found.high is None else found.high - found.value, found.samples)


def ratio(samples: Sequence[float], others: Sequence[float]) -> Estimate:
    """The ratio of the geometric means of measurements made apart, all positive; the interval is Welch's, of the difference of their
    logarithms, with its degrees of freedom rounded down."""
    logs = [[math.log(value) for value in values] for values in (samples, others)]
    middle, fewest = fmean(logs[0]) - fmean(logs[1]), min(map(len, logs))
    if fewest < 2:
        return _exp(middle, None, fewest)
    errors = [variance(values) / len(values) for values in logs]
    if not sum(errors):
        return _exp(middle, 0.0, fewest)
    freedom = sum(errors) ** 2 / sum(error**2 / (len(values) - 1) for error, values in zip(errors, logs, strict=True))
    return _exp(middle, t_95(max(1, math.floor(freedom + 1e-9))) * math.sqrt(sum(errors)), fewest)


def _exp(middle: float, half: float | None, samples: int) -> Estimate:
    if half is None:
        return Estimate(math.exp(middle), None, None, samples)
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), samples)
