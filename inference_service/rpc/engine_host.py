"""The engine's process, kept running: started, watched, ended, and started again where it is lost. Knows nothing of gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from math import inf
from pathlib import Path

import msgspec

from inference_service.config import Config
from inference_service.messages import EngineStart, Failed, Gone, Hello, Progress, Ready, ToFrontEnd
from inference_service.rpc.backoff import Backoff
from inference_service.rpc.child import Child
from inference_service.rpc.control import EngineAt, EngineEvent, EngineLost
from inference_service.rpc.engine_socket import EngineSocket

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "inference_service.engine.process"]
TICK_S = 0.5
START_FACTOR = 3
"""How many times longer than the last start another one may take; how long the first takes, nobody knows."""


class EngineError(RuntimeError):
    """The engine could not start even once."""


class EngineHost:
    """Keeps one engine running; `on_event` is told where each one is, and when it is lost."""

    def __init__(
        self, config: Config, model_dir: Path, on_event: Callable[[EngineEvent], None], on_progress: Callable[[str], None]
    ) -> None:
        """`on_progress` is told how a start gets on."""
        self._config, self._model_dir = config, model_dir
        self._on_event, self._on_progress = on_event, on_progress
        self._engine: Engine | None = None

    async def run(self) -> None:
        """Returns once the engine is lost for good. Raises EngineError where the first start fails. When cancelled, ends the engine."""
        # The directory is private to the user, and so are the sockets in it: a new one each time, since front ends of the last engine
        # must not meet the next before they know that it is another one.
        directory = tempfile.mkdtemp(prefix=f"inference-service-{os.getpid()}-")
        backoff, start_s, timeout_s = Backoff(), 0.0, self._config.server.engine_timeout_s
        try:
            for number in count():
                address = f"ipc://{directory}/{number}"
                self._engine = engine = Engine(EngineStart(self._config, str(self._model_dir), address, os.getpid()), self._on_progress)
                self._on_event(EngineAt(address, engine.pid))
                try:
                    reason = await engine.lost(timeout_s, START_FACTOR * start_s + timeout_s if start_s else inf)
                    start_s = engine.start_s or start_s
                    if not start_s:
                        raise EngineError(f"the engine could not start: {reason}")
                    wait_s = backoff.wait_s(engine.served_s)
                    for_good = backoff.deaths > self._config.server.engine_restarts
                    log.error("the engine is lost%s: %s", " for good" if for_good else "", reason)
                    # Before it has ended, which takes a while where it holds much memory.
                    self._on_event(EngineLost(reason, 0 if for_good else wait_s + start_s))
                finally:
                    self._engine = None
                    await engine.end()
                if for_good:
                    return
                log.info("another engine is started in %g s", wait_s)
                await asyncio.sleep(wait_s)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def forget(self, name: str) -> None:
        """Tell the engine that a front end has died: it drops its requests."""
        if self._engine is not None:
            self._engine.tell(Gone(name.encode()))


class Engine:
    """One engine's process, from its start to its end."""

    def __init__(self, start: EngineStart, on_progress: Callable[[str], None]) -> None:
        self.start_s = 0.0
        """How long it took to get ready; 0: it has not."""
        self._began_s = self._heard_s = time.monotonic()
        self._error = ""
        self._on_progress = on_progress
        self._socket = EngineSocket(start.address, Hello(watches=True), self._on_message)
        self._child = Child(COMMAND, stdin=subprocess.PIPE)
        with suppress(BrokenPipeError), self._child.stdin as pipe:  # one that has died already is seen by its end
            pipe.write(msgspec.json.encode(start))

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def served_s(self) -> float:
        """How long it has been ready."""
        return time.monotonic() - self._began_s - self.start_s if self.start_s else 0.0

    def tell(self, message: Gone) -> None:
        """Send it a message."""
        self._socket.send(message)

    async def lost(self, timeout_s: float, start_limit_s: float) -> str:
        """Wait until it has died, failed, not got ready within `start_limit_s` or, once ready, not been heard of for `timeout_s`; says
        which."""
        while not self._child.exited.is_set():
            before_s = time.monotonic()
            try:
                await asyncio.wait_for(self._child.exited.wait(), TICK_S)
            except TimeoutError:
                # While this process was paused itself, or too busy, it could not hear anything.
                deaf_s = time.monotonic() - before_s - TICK_S
                self._socket.receive()
                silence_s = time.monotonic() - self._heard_s - deaf_s
                if self.start_s and silence_s > timeout_s:
                    return f"nothing heard of it for {silence_s:.0f} s"
                if not self.start_s and time.monotonic() - self._began_s > start_limit_s:
                    return f"it is not ready after {start_limit_s:.0f} s"
            if self._error:
                return self._error
        # What it said last comes first, such as why.
        self._socket.receive()
        return self._error or f"its process {self._child.end}"

    async def end(self) -> None:
        """Kill it. It holds nothing that must be saved."""
        self._socket.close()
        await self._child.ended()

    def _on_message(self, message: ToFrontEnd) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, Progress):
            self._on_progress(message.what)
        elif isinstance(message, Ready):
            self.start_s = self._heard_s - self._began_s
        elif isinstance(message, Failed):
            self._error = message.error
