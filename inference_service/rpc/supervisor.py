"""Several front ends on one port, for one engine: this process starts them all and watches over them, and answers no call itself.

A front end that dies takes its own streams with it and is started again. This process ends when they have drained; if it dies, they end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace

from inference_service.config import Config, Server
from inference_service.fetch import resolve_model
from inference_service.rpc.backoff import Backoff
from inference_service.rpc.child import Child
from inference_service.rpc.control import (
    Control,
    Drain,
    EngineEvent,
    EngineProgress,
    FromWorker,
    Listening,
    NotStarted,
    Serving,
    Stop,
    ToWorker,
    WorkerStart,
)
from inference_service.rpc.engine_host import EngineHost
from inference_service.rpc.tasks import run_with

log = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "inference_service.rpc.worker"]
TICK_S = 0.5
PATIENCE_S = 5.0
"""How long front ends may take beyond the time that a drain has; then they are killed."""
LOOPBACK = "127.0.0.1"
ANY_HOST = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


class SuperviseError(RuntimeError):
    """A port is taken, or a front end could not start."""


def supervise(config: Config) -> None:
    """Serve until a drain ends. Raises SuperviseError, EngineError when the engine cannot start, ConfigError for a bad model."""
    model_dir = resolve_model(config.model.path)
    with reserve_ports(config.server) as server:
        uvloop.run(Supervisor(replace(config, server=server), model_dir).run())


class Supervisor:
    """The front ends, from the first one's start to the last one's end, and the engine."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        """`config` names the ports that are reserved."""
        self._config, self._model_dir = config, model_dir
        self._host = EngineHost(config, model_dir, self._follow, self._progress)
        self._engine: EngineEvent | None = None
        """The latest about it."""
        self._workers: dict[int, Worker] = {}
        self._missing = set(range(config.server.workers))
        """Front ends that have not served yet."""
        self._left = config.server.workers
        self._draining = asyncio.Event()
        self._drained = asyncio.Event()

    async def run(self) -> None:
        """Until all have drained."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._drain_or_stop)
        keepers = [self._keep(index) for index in range(self._config.server.workers)]
        await run_with(self._until_drained(), self._host.run(), self._watch(), *keepers)

    async def _until_drained(self) -> None:
        await self._drained.wait()

    async def _watch(self) -> None:
        """End front ends that hang."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(TICK_S)
            # While this process was paused itself, it could not hear anything.
            deaf_s = time.monotonic() - before_s - TICK_S
            for index, worker in self._workers.items():
                silence_s = time.monotonic() - worker.heard_s - deaf_s
                if worker.listened and silence_s > self._config.server.engine_timeout_s:
                    log.error("nothing heard of front end %d for %.0f s", index, silence_s)
                    worker.child.kill()

    async def _keep(self, index: int) -> None:
        """Run a front end, again and again, until a drain."""
        backoff = Backoff()
        for life in count():
            began_s = time.monotonic()
            worker = await self._run(index, f"front end {index}.{life}", joins=life > 0)
            if self._draining.is_set():
                break
            if not worker.listened and not life:
                raise SuperviseError(worker.error or f"a front end {worker.child.end} before it listened")
            wait_s = backoff.wait_s(time.monotonic() - began_s)
            why = f" ({worker.error})" if worker.error else ""
            log.error("front end %d %s%s; it is started again in %g s", index, worker.child.end, why, wait_s)
            try:
                await asyncio.wait_for(self._draining.wait(), wait_s)
                break
            except TimeoutError:
                continue
        self._left -= 1
        if not self._left:
            self._drained.set()

    async def _run(self, index: int, name: str, joins: bool) -> Worker:
        """A front end's life."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = Child(COMMAND, stdin=theirs.fileno())
        control: Control[FromWorker, ToWorker] = await Control.open(ours, msgspec.json.Decoder(FromWorker))
        worker = self._workers[index] = Worker(child, control)
        try:
            control.send(WorkerStart(self._config, str(self._model_dir), index, name, joins))
            if self._engine is not None:
                control.send(self._engine)
            if self._draining.is_set():
                control.send(Drain())
            async for message in control:
                self._heard(index, message)
        finally:
            del self._workers[index]
            await control.close()
            await child.ended(PATIENCE_S if self._draining.is_set() else 1.0)
            self._host.forget(name)
        return worker

    def _heard(self, index: int, message: FromWorker) -> None:
        worker = self._workers[index]
        worker.heard_s = time.monotonic()
        match message:
            case Listening():
                worker.listened = True
            case NotStarted():
                worker.error = message.error
            case Serving():
                if self._missing == {index} and not self._draining.is_set():
                    print(f"ready on {format_address(self._config.server.host, self._config.server.port)}", flush=True)
                self._missing.discard(index)
            case Drain():
                self._drain()

    def _follow(self, event: EngineEvent) -> None:
        self._engine = event
        self._tell_all(event)

    def _progress(self, what: str) -> None:
        if 0 in self._workers:
            self._workers[0].control.send(EngineProgress(what))

    def _drain_or_stop(self) -> None:
        """What a signal asks for: a drain; a second one, while it lasts, to stop at once."""
        if self._draining.is_set():
            self._tell_all(Stop())
            asyncio.get_running_loop().call_later(PATIENCE_S, self._kill_all)
        else:
            self._drain()

    def _drain(self) -> None:
        if not self._draining.is_set():
            self._draining.set()
            self._tell_all(Drain())
            server = self._config.server
            limit_s = server.drain_propagation_s + server.drain_s + PATIENCE_S
            asyncio.get_running_loop().call_later(limit_s, self._kill_all)

    def _tell_all(self, message: ToWorker) -> None:
        for worker in self._workers.values():
            worker.control.send(message)

    def _kill_all(self) -> None:
        for worker in self._workers.values():
            worker.child.kill()


@dataclass
class Worker:
    """A front end's process, as the supervisor sees it."""

    child: Child
    control: Control[FromWorker, ToWorker]
    heard_s: float = 0.0
    listened: bool = False
    error: str = ""
    """Why it could not start."""


@contextmanager
def reserve_ports(server: Server) -> Iterator[Server]:
    """Hold the ports, so that nobody else takes them while no front end listens, and choose those that are 0. Raises SuperviseError."""
    wanted = {"port": server.host, "admin_port": LOOPBACK, "health_port": ANY_HOST}
    with ExitStack() as held:
        ports = {}
        for key, host in wanted.items():
            port = getattr(server, key)
            if port is not None:
                ports[key] = held.enter_context(_reserve(key, host, port)).getsockname()[1]
        yield replace(server, **ports)


def _reserve(key: str, host: str, port: int) -> socket.socket:
    """A socket that is bound, but takes no connections."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # A second server's front ends could join this one's on the port in silence; a socket that does not share it finds them out.
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        held = socket.socket(family, kind)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind(address)
        except OSError:
            # Old connections of a server that did not share the port. Else it is held without this option, so that `alone` of a second
            # server that is started at the same time finds it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(address)
    except OSError as error:
        raise SuperviseError(f"server.{key}: cannot listen on {format_address(host, port)}: {error.strerror}") from None
    return held


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
