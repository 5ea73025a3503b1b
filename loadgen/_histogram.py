"""A histogram of log-linear buckets: percentiles within 0.05 % of the raw value, and merging that loses nothing.

Values below 2048 have a bucket each; above, every octave is cut into 1024 buckets (as HdrHistogram does). Two histograms that are
merged equal one that was given all the values, so percentiles over many processes are those of the pooled data.
"""

from __future__ import annotations

import math
from collections import Counter

import msgspec

_BITS = 10
"""An octave has 2 ** _BITS buckets, so a bucket's middle is within 2 ** -(_BITS + 1) of each of its values."""


class Histogram(msgspec.Struct):
    """Counts non-negative integers, such as nanoseconds. Count, sum, least and largest value are exact."""

    buckets: dict[int, int] = {}
    count: int = 0
    total: int = 0
    least: int = 0
    largest: int = 0

    def add(self, value: int) -> None:
        self._widen(value, value)
        bucket = _bucket(value)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value

    def extend(self, values: list[int]) -> None:
        """Add them all: four times as fast as one by one, and a stream's gaps are most of what is counted."""
        if not values:
            return
        self._widen(min(values), max(values))
        for bucket, count in Counter(map(_bucket, values)).items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += len(values)
        self.total += sum(values)

    def merge(self, other: Histogram) -> None:
        if not other.count:
            return
        self._widen(other.least, other.largest)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / self.count if self.count else 0.0

    def cumulative(self) -> list[tuple[int, int]]:
        """(value, how many are at most so large) of each bucket, rising."""
        seen, steps = 0, []
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            steps.append((min(max(_middle(bucket), self.least), self.largest), seen))
        return steps

    def percentile(self, percent: float) -> int:
        """The nearest-rank percentile, `percent` in [0, 100], to the width of a bucket; 0 of nothing."""
        # Rounded, since 0.07 * 100 is 7.000000000000001 and would be the eighth value.
        rank = max(1, math.ceil(round(percent * self.count / 100, 6)))
        return next((value for value, seen in self.cumulative() if seen >= rank), 0)

    def _widen(self, least: int, largest: int) -> None:
        self.least = min(self.least, least) if self.count else least
        self.largest = max(self.largest, largest)


def _bucket(value: int) -> int:
    shift = max(0, value.bit_length() - _BITS - 1)
    return (shift << _BITS) + (value >> shift)


def _middle(bucket: int) -> int:
    shift = max(0, (bucket >> _BITS) - 1)
    lowest = (bucket - (shift << _BITS)) << shift
    return lowest + (1 << shift) // 2
