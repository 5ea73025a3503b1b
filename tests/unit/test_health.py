"""The health service, through a real asyncio server within this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from inference_service.rpc.health import NOT_SERVING, SERVING, HealthServicer
from inference_service.rpc.malformed import Registrar
from tests.fuzz.frames import DATA, END_STREAM, GOOD, INITIAL_WINDOW_SIZE, begin, frame, message, request, setting

UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN
SOON_S = 20.0


@asynccontextmanager
async def served() -> AsyncIterator[tuple[HealthServicer, int, Any]]:
    """The service, its port, and a stub of it."""
    servicer, server = HealthServicer(), grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, Registrar(server))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield servicer, port, health_pb2_grpc.HealthStub(channel)
    finally:
        await server.stop(0)


async def test_each_service_has_its_status() -> None:
    async with served() as (servicer, _, stub):
        servicer.set("", True)
        servicer.set("api", False)
        assert (await stub.Check(pb.HealthCheckRequest())).status == SERVING
        assert (await stub.Check(pb.HealthCheckRequest(service="api"))).status == NOT_SERVING
        assert {name: each.status for name, each in (await stub.List(pb.HealthListRequest())).statuses.items()} == {
            "": SERVING,
            "api": NOT_SERVING,
        }
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(pb.HealthCheckRequest(service="another"))
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_watchers_are_told_of_changes_alone() -> None:
    async with served() as (servicer, _, stub):
        watches = [stub.Watch(pb.HealthCheckRequest(service="api"), timeout=SOON_S) for _ in range(2)]
        assert [(await watch.read()).status for watch in watches] == [UNKNOWN, UNKNOWN]
        servicer.set("api", True)
        assert [(await watch.read()).status for watch in watches] == [SERVING, SERVING]
        watches[0].cancel()
        servicer.set("api", True)
        servicer.set("another", False)
        servicer.set("api", False)
        assert (await watches[1].read()).status == NOT_SERVING


async def test_a_watcher_that_reads_nothing_holds_up_nobody() -> None:
    async with served() as (servicer, port, stub):
        servicer.set("api", True)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        headers = [(key, "/grpc.health.v1.Health/Watch" if key == ":path" else value) for key, value in GOOD]
        body = message(pb.HealthCheckRequest(service="api").SerializeToString())
        writer.write(begin(setting(INITIAL_WINDOW_SIZE, 0)) + request(headers) + frame(DATA, END_STREAM, 1, body))
        await reader.read(1)
        await asyncio.sleep(0.2)
        watch = stub.Watch(pb.HealthCheckRequest(service="api"), timeout=SOON_S)
        assert (await watch.read()).status == SERVING
        servicer.set("api", False)
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(pb.HealthCheckRequest(service="api"), timeout=SOON_S)).status == NOT_SERVING
        writer.close()


@pytest.mark.parametrize("method", ["Check", "List", "Watch"])
async def test_what_is_no_request_has_a_status_and_leaves_no_traceback(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (_, port, _), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        raw: Any = channel
        call = raw.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff", timeout=SOON_S)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    # gRPC's poller may log that the loop of an earlier test is closed.
    ours = [each for each in caplog.records if not (each.name == "asyncio" and "PollerCompletionQueue" in each.getMessage())]
    assert not [each for each in ours if each.exc_info or "Traceback" in each.getMessage()]
