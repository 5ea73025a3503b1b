"""Puts the front end together and runs it until it has drained or its engine cannot start."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference.v1 import inference_pb2, inference_pb2_grpc
from inference_service.config import Config
from inference_service.fetch import resolve_model
from inference_service.messages import EngineStart
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.lifecycle import API, Lifecycle
from inference_service.rpc.servicer import InferenceServicer
from inference_service.telemetry import names
from inference_service.telemetry.tracing import Tracing
from inference_service.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

TICK_S = 0.5
STOP_S = 1.0
"""How long the server waits, at its end, for last messages to leave."""


class ServeError(RuntimeError):
    """The server could not start."""


def serve(config: Config) -> None:
    """Serve until a drain ends. Raises ServeError when the port is taken or the engine cannot start, ConfigError for a bad model."""
    model_dir = resolve_model(config.model.path)
    uvloop.run(_serve(config, model_dir))


async def _serve(config: Config, model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    tokenizer.detokenizer()  # builds its table now, not in the first request
    model = config.model.name or model_dir.name
    tracing = Tracing(config.telemetry, names.SERVER_SERVICE)
    engine = EngineClient(
        EngineStart(config, str(model_dir), "", tokenizer.vocab_size, 0),
        on_change=lambda: lifecycle.engine_changed(),
        on_progress=lambda what: log.info("%s", what),
    )
    lifecycle = Lifecycle(config.server, engine)
    servicer = InferenceServicer(config, model, tokenizer, engine, lifecycle, tracing)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lifecycle.drain_or_stop)
    server, address = await _listen(config, servicer, lifecycle)
    ticks = asyncio.create_task(_tick(config, engine, servicer))
    try:
        engine.start()
        await _until_ready(engine, lifecycle)
        # What start-up made lives as long as the process: the collector need not walk it again and again.
        gc.collect()
        gc.freeze()
        if engine.ready is not None and not lifecycle.drained.is_set():
            print(f"ready on {address}", flush=True)
        await lifecycle.drained.wait()
    finally:
        ticks.cancel()
        await server.stop(STOP_S)
        await engine.stop()
        await asyncio.to_thread(tracing.shutdown)


async def _listen(config: Config, servicer: InferenceServicer, lifecycle: Lifecycle) -> tuple[grpc.aio.Server, str]:
    """A started server and its address. The port is bound before the model is loaded, so that a taken one is known at once."""
    options = [
        # On by default, it would let a second server bind the same port in silence.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.server.max_message_mib * 2**20),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ]
    with _threads_that_do_not_preempt():
        server = grpc.aio.server(options=options)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(lifecycle.health, server)
    names_served = [service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names_served, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
    assert API in names_served
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    try:
        port = server.add_insecure_port(f"{host}:{config.server.port}")
    except RuntimeError as error:
        raise ServeError(f"server.port: cannot listen on {host}:{config.server.port}: {error}") from None
    await lifecycle.publish()
    await server.start()
    return server, f"{host}:{port}"


@contextmanager
def _threads_that_do_not_preempt() -> Iterator[None]:
    """Threads that begin here let a running one go on when they are woken.

    gRPC's completion thread is woken for every message written. Where it takes the core from the event loop each time, a message costs
    half as much again; like this it finds the completions of a whole step at once.
    """
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


async def _until_ready(engine: EngineClient, lifecycle: Lifecycle) -> None:
    """Wait for the engine, or for a drain that came first."""
    waits = [asyncio.create_task(lifecycle.changed.wait()), asyncio.create_task(lifecycle.drained.wait())]
    _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    if engine.error is not None and engine.ready is None:
        raise ServeError(f"the engine could not start: {engine.error}")


async def _tick(config: Config, engine: EngineClient, servicer: InferenceServicer) -> None:
    """What has to be looked after now and then: an engine that says nothing, readers that take nothing, the load."""
    while True:
        before_s = time.monotonic()
        await asyncio.sleep(TICK_S)
        # While this process was paused itself, or too busy, it could not hear anything.
        deaf_s = time.monotonic() - before_s - TICK_S
        silence_s = engine.silence_s() - deaf_s
        if engine.ready is not None and silence_s > config.server.engine_timeout_s:
            engine.lose(f"nothing heard of it for {silence_s:.0f} s")
        servicer.cut_off_stuck()
        servicer.measure_load()
