"""What the server is up to: starting, serving, draining, or without its engine; and what health says of it.

The health service's "" is liveness: a restart would help when it is NOT_SERVING. The API's name is readiness: SERVING once the engine has
made a first token, and until a drain begins.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from grpc_health.v1 import health, health_pb2

from inference_service.config import Server
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import RpcError, unavailable

API = "inference.v1.InferenceService"
LIVENESS = ""
CUT_OFF_S = 1.0
"""How long requests that are cut off have to tell their clients so."""

log = logging.getLogger(__name__)


class Lifecycle:
    """Decides whether requests are admitted. `drained` is set when the server may stop."""

    def __init__(self, config: Server, engine: EngineClient) -> None:
        self.health = health.aio.HealthServicer()
        self.draining = False
        self.drained = asyncio.Event()
        self.in_flight = 0
        """Generate calls being served."""
        self.changed = asyncio.Event()
        """Set whenever the engine got ready or was lost."""
        self._config = config
        self._engine = engine
        self._refusing = False
        self._idle = asyncio.Event()
        self._drain: asyncio.Task[None] | None = None

    async def publish(self) -> None:
        """Bring the health service up to date."""
        alive = self._engine.error is None
        await self._set(LIVENESS, alive)
        await self._set(API, alive and self._engine.ready is not None and not self.draining)

    def engine_changed(self) -> None:
        """To be called when the engine got ready or was lost."""
        self.changed.set()
        asyncio.get_running_loop().create_task(self.publish())

    def refusal(self) -> RpcError | None:
        """Why a new request cannot be admitted now, or None."""
        if self._engine.error is not None:
            return unavailable("ENGINE_LOST", f"the engine is lost: {self._engine.error}")
        if self._engine.ready is None:
            return unavailable("STARTING", "the model is being loaded", retry_s=5.0)
        if self._refusing:
            return unavailable("DRAINING", "the server is draining; try another one")
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
            self._drain = asyncio.get_running_loop().create_task(self._run_drain())

    def drain_or_stop(self) -> None:
        """What a signal asks for: a drain; a second one, while it lasts, to stop at once."""
        if self.draining:
            log.warning("stopping: %d requests are cut off", self.in_flight)
            self._cut_off()
            self.drained.set()
        self.drain()

    async def _run_drain(self) -> None:
        """NOT_SERVING, time for balancers to notice, refuse, let running requests finish."""
        log.info("draining: %d requests in flight", self.in_flight)
        await self.publish()
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

    async def _set(self, service: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set(service, status)
