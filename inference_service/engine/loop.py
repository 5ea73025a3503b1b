"""The engine's loop: take requests in, plan and launch a step, then take in the step before it and send its ids out.

While the loop handles the results of step N, step N + 1 is computed already. It never waits for a reader: what it sends is queued.
"""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

from inference_service.engine.link import FrontEnds
from inference_service.engine.requests import Request
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import Executor, Ticket
from inference_service.engine.step_meter import StepMeter
from inference_service.messages import Abort, AbortById, Aborted, ExpertSample, Gone, Output, Profile, Step, StepWork, Submit

HEARTBEAT_S = 1.0
PATIENCE_S = 0.01
"""Where requests are there but none can be computed: their grammars are being compiled."""


class EngineLoop:
    """Serves the front ends until its process ends."""

    def __init__(self, front_ends: FrontEnds, scheduler: Scheduler, executor: Executor) -> None:
        self.front_ends = front_ends
        self.scheduler = scheduler
        self.executor = executor
        self._compiles_before = executor.compiles
        self._meter = StepMeter()
        self._beat_ns = 0
        """When the watcher last got a heartbeat."""

    def run(self) -> NoReturn:
        """Step for ever. Raises what a step raises."""
        in_flight: tuple[Scheduled, Ticket] | None = None
        busy = False
        while True:
            outputs = self._receive(0.0 if busy else HEARTBEAT_S if not len(self.scheduler) else PATIENCE_S)
            outputs += self.scheduler.follow_grammars() + self.scheduler.expire(time.monotonic_ns())
            experts = work = None
            step = self.scheduler.schedule(time.monotonic_ns())
            launched = (step, self.executor.launch(step.plan)) if step else None
            if in_flight:
                scheduled, ticket = in_flight
                while not ticket.ended(HEARTBEAT_S):
                    self._send([])
                result = ticket.wait()
                work = self._meter.work(scheduled, self.scheduler.preemptions)
                outputs += self.scheduler.update(scheduled, result)
                if result.distinct_experts is not None:
                    experts = ExpertSample(len(scheduled.plan.rows), result.distinct_experts)
            self._send(outputs, experts, work)
            # Whatever ended in this round may let something begin in the next.
            busy = bool(in_flight or launched or outputs)
            in_flight = launched

    def _receive(self, timeout_s: float) -> list[tuple[Request, Output]]:
        """Take in what has arrived; what is to be said of requests at once."""
        outputs: list[tuple[Request, Output]] = []
        for origin, message in self.front_ends.receive(timeout_s, self.scheduler.wake):
            if isinstance(message, Submit):
                outputs += self.scheduler.submit(message, origin)
            elif isinstance(message, Abort):
                for key in message.keys:
                    self.scheduler.abort(key, origin)
            elif isinstance(message, AbortById):
                ended = self.scheduler.abort_by_id(message.request_id)
                outputs += ended
                self.front_ends.send(origin, Aborted(message.call, found=bool(ended)))
            elif isinstance(message, Gone):
                self.scheduler.abort_all(message.name)
            elif isinstance(message, Profile):
                from inference_service.execution.profiling import start_profile

                start_profile(Path(message.path), message.seconds)
        return outputs

    def _send(self, outputs: list[tuple[Request, Output]], experts: ExpertSample | None = None, work: StepWork | None = None) -> None:
        """One frame to each front end, also where it has no outputs: it is the heartbeat, and says how busy the engine is."""
        by_origin: dict[bytes, list[Output]] = defaultdict(list)
        for request, output in outputs:
            by_origin[request.origin].append(output)
        now_ns, load, compiles = time.monotonic_ns(), self.scheduler.load, self.executor.compiles - self._compiles_before
        for origin in self.front_ends.known:
            self.front_ends.send(origin, Step(now_ns, by_origin[origin], load, experts, compiles, work, self.executor.fused_steps))
        if now_ns - self._beat_ns > HEARTBEAT_S / 2 * 1e9:
            self._beat_ns = now_ns
            self.front_ends.report(Step(now_ns, [], load))
