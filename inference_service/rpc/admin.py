"""The admin port: what operators alone may do. Whoever reaches it may do it: it is bound to this machine's loopback address."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_channelz.v1 import channelz
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inference.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, info_pb2
from inference_service.rpc.auth import Call, Handler, refusal
from inference_service.rpc.engine_client import EngineClient
from inference_service.rpc.errors import RpcError, invalid
from inference_service.rpc.lifecycle import API, Lifecycle
from inference_service.rpc.malformed import Registrar

HOST = "127.0.0.1"
MAX_PROFILE_S = 60.0
WRITE_S = 120.0
"""How long a trace may take to be written."""
POLL_S = 0.1
Context = grpc.aio.ServicerContext[Any, Any]
DRAIN = f"/{API}/Drain"
DRAIN_ELSEWHERE = RpcError(grpc.StatusCode.PERMISSION_DENIED, "ADMIN_PORT_ONLY", "Drain is served on server.admin_port alone")


class NoDrain(grpc.aio.ServerInterceptor):
    """Refuses Drain where the API is served beside an admin port, or to clients of different tokens."""

    async def intercept_service(self, continuation: Callable[[Call], Awaitable[Handler]], handler_call_details: Call) -> Handler:
        return refusal(DRAIN_ELSEWHERE) if handler_call_details.method == DRAIN else await continuation(handler_call_details)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Profiles of the engine."""

    def __init__(self, load_format: str, engine: EngineClient, lifecycle: Lifecycle) -> None:
        self._load_format = load_format
        self._engine = engine
        self._lifecycle = lifecycle
        self._recording = False

    async def Profile(self, request: admin_pb2.ProfileRequest, context: Context) -> admin_pb2.ProfileResponse:
        """See admin.proto."""
        seconds = request.seconds if request.HasField("seconds") else 1.0
        if error := self._refusal(seconds):
            await error.abort(context)
        self._recording = True
        try:
            # Private to the user, as what mkdtemp makes is.
            path = Path(tempfile.mkdtemp(prefix="inference-profile-")) / "trace.json"
            self._engine.profile(str(path), seconds)
            size = await _written(path, seconds)
        except RpcError as error:
            await error.abort(context)
        finally:
            self._recording = False
        return admin_pb2.ProfileResponse(path=str(path), bytes=size)

    def _refusal(self, seconds: float) -> RpcError | None:
        if not 0 < seconds <= MAX_PROFILE_S:
            return invalid("seconds", f"must be in (0, {MAX_PROFILE_S:g}], not {seconds:g}")
        if self._load_format == "echo":
            return RpcError(grpc.StatusCode.UNIMPLEMENTED, "NOTHING_TO_PROFILE", "the echo engine computes nothing")
        if self._recording:
            return RpcError(grpc.StatusCode.ALREADY_EXISTS, "PROFILE_RUNNING", "a profile is being recorded")
        return self._lifecycle.refusal()


async def _written(path: Path, seconds: float) -> int:
    """The size of a profile, once it is there."""
    end = time.monotonic() + seconds + WRITE_S
    fault = path.with_suffix(".error")
    while not path.exists():
        if fault.exists() or time.monotonic() > end:
            why = fault.read_text() if fault.exists() else f"nothing was written within {WRITE_S:g} s of its end"
            raise RpcError(grpc.StatusCode.INTERNAL, "PROFILE_FAILED", why)
        await asyncio.sleep(POLL_S)
    return path.stat().st_size


def add_admin_services(
    server: grpc.aio.Server, api: inference_pb2_grpc.InferenceServiceServicer, lifecycle: Lifecycle, admin: AdminServicer
) -> None:
    """Drain, profiles, health, reflection of both ports' services, and channelz, which sees the channels of the whole process."""
    drain = grpc.unary_unary_rpc_method_handler(
        api.Drain,
        request_deserializer=info_pb2.DrainRequest.FromString,
        response_serializer=info_pb2.DrainResponse.SerializeToString,
    )
    registrar = Registrar(server)
    registrar.add_registered_method_handlers(API, {"Drain": drain})
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, registrar)
    health_pb2_grpc.add_HealthServicer_to_server(lifecycle.health, registrar)
    channelz.add_channelz_servicer(server)
    add_reflection(server, "inference.v1.AdminService", "grpc.channelz.v1.Channelz")


def add_reflection(server: grpc.aio.Server, *further: str) -> None:
    """Let clients ask for the services' descriptors: those of the API, of health, and of `further` ones."""
    names = [service.full_name for service in inference_pb2.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names, *further, "grpc.health.v1.Health", reflection.SERVICE_NAME], server)
