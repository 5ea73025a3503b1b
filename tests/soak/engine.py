"""The engine's process with its page invariants checked after every step; one that does not hold ends it, with a traceback in the log."""

from __future__ import annotations

import logging
from itertools import count

from inference_service.engine import process
from inference_service.engine.requests import Request
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import StepResult
from inference_service.messages import Output

EVERY = 100
HELD = f"the page invariants have held {EVERY} times more"

log = logging.getLogger("tests.soak")
checks = count(1)
update = Scheduler.update


def checked_update(scheduler: Scheduler, step: Scheduled, result: StepResult) -> list[tuple[Request, Output]]:
    outputs = update(scheduler, step, result)
    scheduler.check_invariants()
    if not next(checks) % EVERY:
        log.info(HELD)
    return outputs


if __name__ == "__main__":
    Scheduler.update = checked_update  # type: ignore[assignment]
    process.main()
