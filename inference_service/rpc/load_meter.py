"""Tokens a second, over the last seconds."""

from __future__ import annotations

from collections import deque


class LoadMeter:
    """A sliding window over a counter that only grows."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._notes: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, count: int) -> None:
        """The counter's value now."""
        self._notes.append((now_s, count))
        while len(self._notes) > 2 and self._notes[1][0] <= now_s - self._window_s:
            self._notes.popleft()

    def rate(self) -> float:
        """Counts a second from the first note of the window to the last; 0 with fewer than two notes."""
        if len(self._notes) < 2:
            return 0.0
        (start_s, start), (end_s, end) = self._notes[0], self._notes[-1]
        return (end - start) / (end_s - start_s) if end_s > start_s else 0.0
