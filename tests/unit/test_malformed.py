"""Requests that are no messages, or never come, through a real asyncio server within this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from inference.v1 import generate_pb2 as pb
from inference.v1 import inference_pb2_grpc
from inference_service.rpc import malformed
from inference_service.rpc.caller import CALLER, Caller
from inference_service.rpc.malformed import Registrar

METHODS = ("Generate", "Tokenize")
GOOD = pb.TokenizeRequest(text="abc").SerializeToString()


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Gives back what it has read."""

    async def Generate(self, request: Any, context: Any) -> None:
        await context.write(pb.GenerateResponse(accepted=pb.Accepted(request_id=request.text)))

    async def Tokenize(self, request: Any, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=request.text.encode())


class Identify(grpc.aio.ServerInterceptor):
    """Takes a caller's name for a token."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        for key, value in handler_call_details.invocation_metadata:
            if key == "caller":
                CALLER.set(Caller(value, None))
        return await continuation(handler_call_details)


@asynccontextmanager
async def served(refused: list[tuple[str, str]] | None = None) -> AsyncIterator[Any]:
    """`refused` gets method and reason of each call that is."""
    told = [] if refused is None else refused
    server = grpc.aio.server(interceptors=[Identify()])
    registrar = Registrar(server, lambda method, _, error: told.append((method.rpartition("/")[2], error.reason)))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Echo(), registrar)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def ends(channel: Any, method: str, *bodies: bytes, half_close: bool = True) -> tuple[str, str]:
    """The code and the details of a call that sends `bodies` as messages."""
    call = channel.stream_stream(f"/inference.v1.InferenceService/{method}")(timeout=20)
    for body in bodies:
        await call.write(body)
    if half_close:
        await call.done_writing()
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return (await call.code()).name, await call.details()


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_is_read_and_others_after_it_are_not(method: str) -> None:
    async with served() as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        assert bytes((await stub.Tokenize(pb.TokenizeRequest(text="abc"))).token_ids) == b"abc"
        assert [event.accepted.request_id async for event in stub.Generate(pb.GenerateRequest(text="abc"))] == ["abc"]
        assert (await ends(channel, method, b""))[0] == "OK"
        assert (await ends(channel, method, GOOD, b"\xff"))[0] == "OK"
        assert (await ends(channel, method, GOOD, half_close=False))[0] == "OK"


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_an_invalid_argument(method: str, caplog: pytest.LogCaptureFixture) -> None:
    told: list[tuple[str, str]] = []
    async with served(told) as channel:
        code, details = await ends(channel, method, b"\xff\xff")
    assert told == [(method, "MALFORMED_REQUEST")]
    assert code == "INVALID_ARGUMENT" and f"inference.v1.{method}Request" in details
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("method", METHODS)
async def test_a_call_without_a_request_is_an_invalid_argument(method: str) -> None:
    async with served() as channel:
        assert await ends(channel, method) == ("INVALID_ARGUMENT", "the call ended without a whole request")


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_does_not_come_is_not_waited_for(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malformed, "REQUEST_S", 0.2)
    told: list[tuple[str, str]] = []
    async with served(told) as channel:
        code, details = await asyncio.wait_for(ends(channel, method, half_close=False), 10)
    assert told == [(method, "NO_REQUEST")]
    assert (code, details) == ("DEADLINE_EXCEEDED", "no request came within 0.2 s")


async def test_one_client_keeps_no_more_than_a_few_requests_half_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malformed, "AT_ONCE", 2)
    async with served() as channel:
        tokenize = channel.stream_unary("/inference.v1.InferenceService/Tokenize")
        begun = [tokenize(timeout=20, metadata=[("caller", "alice")]) for _ in range(3)]
        for call in begun:
            await call.wait_for_connection()
        await asyncio.sleep(0.2)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        assert (await stub.Tokenize(pb.TokenizeRequest(text="abc"), timeout=20, metadata=[("caller", "bob")])).token_ids
        waits = asyncio.ensure_future(stub.Tokenize(pb.TokenizeRequest(text="abc"), timeout=20, metadata=[("caller", "alice")]))
        await asyncio.sleep(0.2)
        assert not waits.done()
        for call in begun[:2]:
            call.cancel()
        await begun[2].write(GOOD)
        assert (await waits).token_ids
