"""The one way from CLOCK_MONOTONIC to the Unix epoch: one offset a process, so that durations survive the conversion exactly."""

from __future__ import annotations

import time


def _measure_offset() -> int:
    """Read the epoch between two readings of the monotonic clock; the closest of several pairs is the least disturbed."""
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(16)]
    before, unix, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return unix - (before + after) // 2


OFFSET_NS = _measure_offset()
"""Unix time minus monotonic time, in nanoseconds, when this process began."""


def to_unix_ns(monotonic_ns: int) -> int:
    """Nanoseconds since the Unix epoch of a `time.monotonic_ns()` reading made by any process of this machine."""
    return monotonic_ns + OFFSET_NS
