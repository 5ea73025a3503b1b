"""What the front end is up to: starting, serving, draining, or without its engine; and what health says of it.

The health service's "" is liveness: a restart of the whole server would help when it is NOT_SERVING. The API's name is readiness: SERVING
once the engine has made a first token, and until a drain begins; not while a lost engine is being started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from inference_service.config import Server
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import RpcError, unavailable
from inference_service.rpc.health import HealthServicer

API = "inference.v1.InferenceService"
LIVENESS = ""
CUT_OFF_S = 1.0
"""How long requests that are cut off have to tell their clients so."""

log = logging.getLogger(__name__)


class Lifecycle:
    """Decides whether requests are admitted. `drained` is set when the server may stop."""

    def __init__(self, config: Server, engine: EngineClient, on_drain: Callable[[], None] = lambda: None) -> None:
        """`on_drain` is called when a drain begins."""
        self.health = HealthServicer()
        self.draining = False
        self.drained = asyncio.Event()
        self.in_flight = 0
        """Generate calls being served."""
        self.settled = asyncio.Event()
        """Set once the first engine is ready, or a drain has begun."""
        self._config = config
        self._engine = engine
        self._refusing = False
        self._idle = asyncio.Event()
        self._on_drain = on_drain
        self._drain: asyncio.Task[None] | None = None

    def publish(self) -> None:
        """Bring the health service up to date."""
        self.health.set(LIVENESS, self._engine.loss is None or self._engine.loss.retry_s > 0)
        self.health.set(API, self._engine.ready is not None and not self.draining)

    def engine_changed(self) -> None:
        """To be called when the engine got ready or was lost."""
        if self._engine.ready is not None:
            self.settled.set()
        self.publish()

    def refusal(self) -> RpcError | None:
        """Why a new request cannot be admitted now, or None."""
        if self._refusing:
            return unavailable("DRAINING", "the server is draining; try another one")
        if self._engine.loss is not None:
            return self._engine.lost_error()
        if self._engine.ready is None:
            return unavailable("STARTING", "the model is being loaded", retry_s=5.0)
        return None

    def entered(self) -> None:
        self.in_flight += 1

    def left(self) -> None:
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    def drain(self) -> None:
        """Begin to drain; a second call changes nothing."""
        if not self.draining:
            self.draining = True
            self.settled.set()
            self._on_drain()
            self._drain = asyncio.get_running_loop().create_task(self._run_drain())

    def drain_or_stop(self) -> None:
        """What a signal asks for: a drain; a second one, while it lasts, to stop at once."""
        if self.draining:
            self.stop()
        else:
            self.drain()

    def stop(self) -> None:
        """Cut off what is in flight."""
        self.drain()
        log.warning("stopping: %d requests are cut off", self.in_flight)
        self._cut_off()
        self.drained.set()

    async def _run_drain(self) -> None:
        """NOT_SERVING, time for balancers to notice, refuse, let running requests finish."""
        log.info("draining: %d requests in flight", self.in_flight)
        self.publish()
        await asyncio.sleep(self._config.drain_propagation_s)
        self._refusing = True
        self._idle.clear()
        if self.in_flight:
            try:
                await asyncio.wait_for(self._idle.wait(), self._config.drain_s)
            except TimeoutError:
                log.warning("draining: %d requests are cut off after %g s", self.in_flight, self._config.drain_s)
                self._cut_off()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), CUT_OFF_S)
        self.drained.set()

    def _cut_off(self) -> None:
        self._engine.fail_all(unavailable("DRAINING", "the server is draining, and the time for requests in flight is over"))
