"""What each step computed and how long it took, for metrics."""

from __future__ import annotations

import time

from inference_service.engine.scheduler import Scheduled
from inference_service.messages import StepWork


class StepMeter:
    """Told of each step when its ids are on the host."""

    def __init__(self) -> None:
        self._ended_ns = 0
        self._preemptions = 0

    def work(self, step: Scheduled, preemptions: int) -> StepWork:
        """Of the step that has just ended; `preemptions`: since the engine was ready, in all."""
        begin_ns, self._ended_ns = max(self._ended_ns, step.planned_ns), time.monotonic_ns()
        before, self._preemptions = self._preemptions, preemptions
        prefill_tokens = 0
        for row in reversed(step.plan.rows):  # decodes come first
            if row.is_decode:
                break
            prefill_tokens += row.length
        return StepWork(len(step.plan.rows), prefill_tokens, self._ended_ns - begin_ns, preemptions - before)
