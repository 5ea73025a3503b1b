"""What the metrics tell of a front end and its engine."""

from __future__ import annotations

import asyncio

from inference_service.messages import Step
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.lifecycle import Lifecycle
from inference_service.telemetry import names
from inference_service.telemetry.metrics import EngineMetrics, Metrics
from inference_service.telemetry.tracing import Tracing


def watch_front_end(metrics: Metrics, lifecycle: Lifecycle, tracing: Tracing) -> None:
    """Of each front end. To be called on its event loop."""
    loop = asyncio.get_running_loop()
    metrics.gauge(names.READY, lambda: lifecycle.refusal() is None)
    metrics.gauge(names.DRAINING, lambda: lifecycle.draining)
    metrics.gauge(names.STREAMS, lambda: lifecycle.in_flight)
    metrics.gauge(names.TASKS, lambda: len(asyncio.all_tasks(loop)))
    metrics.gauge(names.OPEN_SPANS, lambda: tracing.open_traces)
    metrics.total(names.LOST_SPANS, lambda: tracing.lost_spans)


def watch_engine(metrics: Metrics, engine: EngineClient) -> None:
    """Of the engine: by one front end alone, so that sums over all are right."""
    steps = EngineMetrics(metrics)

    def follow(step: Step) -> None:
        if step.work:
            steps.step(step.work)

    engine.on_step.append(follow)
    metrics.gauge(names.WAITING, lambda: engine.load.waiting)
    metrics.gauge(names.RUNNING, lambda: engine.load.running)
    metrics.gauge(names.PAGES_USED, lambda: engine.load.pages_used)
    metrics.gauge(names.PAGES_CACHED, lambda: engine.load.pages_cached)
    metrics.gauge(names.PAGES_TOTAL, lambda: engine.ready.pages if engine.ready else 0)
    metrics.gauge(names.COMPILES, lambda: engine.compiles)
    metrics.total(names.LOSSES, lambda: engine.losses)
    metrics.process("engine", lambda: engine.ready.pid if engine.ready else -1)
