"""Puts the front end together and runs it, with its engine or as one of several, until it has drained."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from pathlib import Path

import uvloop

from inference_service.config import Config, Telemetry
from inference_service.fetch import resolve_model
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.engine_host import EngineHost
from inference_service.rpc.gauges import watch_engine, watch_front_end
from inference_service.rpc.lifecycle import Lifecycle
from inference_service.rpc.listen import Listener, ServeError, listen
from inference_service.rpc.recorder import Recorder
from inference_service.rpc.servicer import InferenceServicer
from inference_service.rpc.tasks import run_with
from inference_service.telemetry import names
from inference_service.telemetry.metrics import Metrics, RequestMetrics
from inference_service.telemetry.startup import ENGINE_PROCESS, LISTEN, TOKENIZER, StartTrace
from inference_service.telemetry.tracing import Tracing
from inference_service.text.tokenizer import Tokenizer

TICK_S = 0.5
STOP_S = 1.0
"""How long the server waits, at its end, for last messages to leave."""


class FrontEnd:
    """A gRPC server and its side of the engine; somebody else has the engine's process, and says where it is."""

    def __init__(
        self,
        config: Config,
        model_dir: Path,
        name: str = "front end",
        on_drain: Callable[[], None] = lambda: None,
        index: int = 0,
    ) -> None:
        """`name` and `on_drain` as EngineClient and Lifecycle have them; `index`: of several front ends. Raises ServeError when the port
        for metrics is taken."""
        self._config = config
        self._tracing = Tracing(config.telemetry, names.SERVER_SERVICE)
        self._start = StartTrace(self._tracing)
        self._start.phase(TOKENIZER)
        tokenizer = Tokenizer.load(model_dir)
        tokenizer.detokenizer()  # builds its table now, not in the first request
        self._listener: Listener | None = None
        self.engine = EngineClient(name, on_change=lambda: self.lifecycle.engine_changed())
        self.lifecycle = Lifecycle(config.server, self.engine, on_drain)
        model = config.model.name or model_dir.name
        self._metrics = make_metrics(config.telemetry, index)
        metrics = RequestMetrics(self._metrics, model)
        self._recorder = Recorder(self._tracing, metrics, model, tokenizer, config.telemetry.record_prompts)
        self._servicer = InferenceServicer(config, model, tokenizer, self.engine, self.lifecycle, self._recorder)
        watch_front_end(self._metrics, self.lifecycle, self._tracing)
        if index == 0:
            watch_engine(self._metrics, self.engine)

    async def listen(self, reuse_port: bool = False) -> str:
        """Bind the ports, before there is an engine; the API's address."""
        self._start.phase(LISTEN)
        self._listener = await listen(self._config, self._servicer, self.lifecycle, self.engine, self._recorder.refused, reuse_port)
        self._start.phase(ENGINE_PROCESS)
        return self._listener.address

    def progress(self, what: str) -> None:
        """How the engine's start gets on; it has logged that itself."""
        self._start.progress(what)

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Until it has drained. `on_ready` is called when it begins to admit requests."""
        await run_with(self._until_drained(on_ready), self._tick())

    async def _until_drained(self, on_ready: Callable[[], None]) -> None:
        await self.lifecycle.settled.wait()
        if not self.lifecycle.draining:
            # What start-up made lives as long as the process: the collector need not walk it again and again.
            gc.collect()
            gc.freeze()
            self._start.end()
            on_ready()
        await self.lifecycle.drained.wait()

    async def close(self) -> None:
        """What is in flight is cut off."""
        if self._listener is not None:
            await self._listener.stop(STOP_S)
        self.engine.close()
        self._start.end("the process ends before it is ready")
        await asyncio.gather(asyncio.to_thread(self._tracing.shutdown), asyncio.to_thread(self._metrics.shutdown))

    async def _tick(self) -> None:
        """What has to be looked after now and then: readers that take nothing, the load."""
        while True:
            await asyncio.sleep(TICK_S)
            self._servicer.cut_off_stuck()
            self._servicer.measure_load()


def make_metrics(config: Telemetry, index: int) -> Metrics:
    """Raises ServeError when the port is taken."""
    try:
        return Metrics(config, index)
    except OSError as error:
        raise ServeError(f"telemetry.metrics_port: cannot listen on {config.metrics_port} + {index}: {error.strerror}") from None


def serve(config: Config) -> None:
    """Serve until a drain ends. Raises ServeError when a port is taken, EngineError when the engine cannot start, ConfigError for a bad
    model."""
    model_dir = resolve_model(config.model.path)
    uvloop.run(_serve(config, model_dir))


async def _serve(config: Config, model_dir: Path) -> None:
    front_end = FrontEnd(config, model_dir)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, front_end.lifecycle.drain_or_stop)
    host = EngineHost(config, model_dir, front_end.engine.follow, front_end.progress)
    try:
        address = await front_end.listen()
        await run_with(front_end.serve(lambda: print(f"ready on {address}", flush=True)), host.run())
    finally:
        await front_end.close()
