"""The engine's loop: take requests in, plan and launch a step, then take in the step before it and send its ids out.

While the loop handles the results of step N, step N + 1 is computed already. It never waits for a reader: what it sends is queued.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict

from inference_service.engine.link import FrontEnds
from inference_service.engine.requests import Request
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import Executor, Ticket
from inference_service.messages import Abort, ExpertSample, Output, Step, Submit

HEARTBEAT_S = 1.0
PATIENCE_S = 0.01
"""Where requests are there but none can be computed: their grammars are being compiled."""


class EngineLoop:
    """Runs until the process that started it is gone."""

    def __init__(self, front_ends: FrontEnds, scheduler: Scheduler, executor: Executor, parent_pid: int) -> None:
        self.front_ends = front_ends
        self.scheduler = scheduler
        self.executor = executor
        self._parent = parent_pid
        self._compiles_before = executor.compiles

    def run(self) -> None:
        """Step until the parent process dies. Raises what a step raises."""
        in_flight: tuple[Scheduled, Ticket] | None = None
        busy = False
        while os.getppid() == self._parent:
            self._receive(0.0 if busy else HEARTBEAT_S if not len(self.scheduler) else PATIENCE_S)
            outputs = self.scheduler.follow_grammars() + self.scheduler.expire(time.monotonic_ns())
            experts = None
            step = self.scheduler.schedule(time.monotonic_ns())
            launched = (step, self.executor.launch(step.plan)) if step else None
            if in_flight:
                scheduled, ticket = in_flight
                while not ticket.ended(HEARTBEAT_S):
                    self._send([])
                result = ticket.wait()
                outputs += self.scheduler.update(scheduled, result)
                if result.distinct_experts is not None:
                    experts = ExpertSample(len(scheduled.plan.rows), result.distinct_experts)
            self._send(outputs, experts)
            # Whatever ended in this round may let something begin in the next.
            busy = bool(in_flight or launched or outputs)
            in_flight = launched

    def _receive(self, timeout_s: float) -> None:
        for origin, message in self.front_ends.receive(timeout_s, self.scheduler.wake):
            if isinstance(message, Submit):
                self.scheduler.submit(message, origin)
            elif isinstance(message, Abort):
                for key in message.keys:
                    self.scheduler.abort(key, origin)

    def _send(self, outputs: list[tuple[Request, Output]], experts: ExpertSample | None = None) -> None:
        """One frame to each front end, also where it has no outputs: it is the heartbeat, and says how busy the engine is."""
        by_origin: dict[bytes, list[Output]] = defaultdict(list)
        for request, output in outputs:
            by_origin[request.origin].append(output)
        now_ns, load, compiles = time.monotonic_ns(), self.scheduler.load, self.executor.compiles - self._compiles_before
        for origin in self.front_ends.known:
            self.front_ends.send(origin, Step(now_ns, by_origin[origin], load, experts, compiles, self.executor.fused_steps))
