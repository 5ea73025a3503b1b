"""How long to wait before a process that has died is started again."""

from __future__ import annotations

FIRST_S, LONGEST_S = 0.5, 30.0
HEALTHY_S = 60.0
"""A process that has served for so long has recovered: what comes later is another trouble."""


class Backoff:
    """Waits that double from FIRST_S to LONGEST_S, and begin anew after a healthy minute."""

    def __init__(self) -> None:
        self.deaths = 0
        """Without a healthy minute between them."""

    def wait_s(self, healthy_s: float) -> float:
        """To be called at each death, with how long the process had been serving."""
        self.deaths = 1 if healthy_s >= HEALTHY_S else self.deaths + 1
        # No power of a number that grows for ever: it would overflow.
        return min(LONGEST_S, FIRST_S * (1 << min(self.deaths - 1, 10)))
