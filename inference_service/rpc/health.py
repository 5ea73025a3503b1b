"""The health service. The one of grpcio-health-checking holds a lock while it writes to a watcher: one that reads nothing would stop the
others from being told, the status from being set, and a drain that waits for that from getting on."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class HealthServicer:
    """Tells the status of services, and tells watchers of its changes, each at its own pace."""

    def __init__(self) -> None:
        self._statuses: dict[str, pb.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()
        """Set when a status has changed, and replaced by another one."""

    def set(self, service: str, serving: bool) -> None:
        """A service's status from now on."""
        self._statuses[service] = SERVING if serving else NOT_SERVING
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """NOT_FOUND: there is no such service."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._statuses[request.service])

    async def List(self, request: pb.HealthListRequest, context: Context) -> pb.HealthListResponse:
        """All of them."""
        return pb.HealthListResponse(statuses={name: pb.HealthCheckResponse(status=status) for name, status in self._statuses.items()})

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> NoReturn:
        """The status now, and whenever it has changed; a slow reader misses those between."""
        told = None
        while True:
            changed, status = self._changed, self._statuses.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                try:
                    await context.write(pb.HealthCheckResponse(status=status))
                except grpc.aio.InternalError:
                    # The connection is gone, and gRPC has yet to cancel the call.
                    raise asyncio.CancelledError from None
                told = status
            await changed.wait()
