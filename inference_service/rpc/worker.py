"""One front end of several: `python -m inference_service.rpc.worker`, started by the supervisor with a socket as its standard input."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import uvloop

from inference_service.rpc.control import (
    Alive,
    Control,
    Drain,
    EngineAt,
    EngineLost,
    EngineProgress,
    FromWorker,
    Listening,
    NotStarted,
    Serving,
    Stop,
    ToWorker,
    WorkerStart,
)
from inference_service.rpc.server import FrontEnd
from inference_service.rpc.tasks import run_with
from inference_service.telemetry.logs import configure_logs

HEARTBEAT_S = 1.0


def main() -> None:
    """Serve until a drain ends or the supervisor does."""
    end = socket.socket(fileno=os.dup(0))
    # No process that this one starts may hold the socket open.
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    uvloop.run(_work(end))


async def _work(end: socket.socket) -> None:
    control: Control[ToWorker, FromWorker] = await Control.open(end, msgspec.json.Decoder(ToWorker))
    messages = aiter(control)
    start = await anext(messages)
    assert isinstance(start, WorkerStart)
    configure_logs(f"worker {start.index}", start.config.telemetry.log_format)
    try:
        model_dir = Path(start.model_dir)
        front_end = FrontEnd(start.config, model_dir, start.name, on_drain=lambda: control.send(Drain()), index=start.index)
        try:
            await run_with(_serve(front_end, start.joins, control), _obey(messages, front_end), _beat(control))
        finally:
            await front_end.close()
    except (RuntimeError, ValueError, OSError) as error:  # those that cli.py shows without a traceback
        control.send(NotStarted(str(error)))
        await control.close()
        sys.exit(1)


async def _serve(front_end: FrontEnd, joins: bool, control: Control[ToWorker, FromWorker]) -> None:
    if joins:
        await front_end.lifecycle.settled.wait()
    await front_end.listen(reuse_port=True)
    control.send(Listening())
    await front_end.serve(lambda: control.send(Serving()))


async def _obey(messages: AsyncIterator[ToWorker], front_end: FrontEnd) -> None:
    """Do what the supervisor says, until it is gone."""
    async for message in messages:
        match message:
            case EngineAt() | EngineLost():
                front_end.engine.follow(message)
            case EngineProgress():
                front_end.progress(message.what)
            case Drain():
                front_end.lifecycle.drain()
            case Stop():
                front_end.lifecycle.stop()
    front_end.engine.follow(EngineLost("the supervisor is gone", 0))
    front_end.lifecycle.stop()


async def _beat(control: Control[ToWorker, FromWorker]) -> None:
    while True:
        control.send(Alive())
        await asyncio.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    main()
