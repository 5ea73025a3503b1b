"""The file of tokens, and what it does to calls: through a real asyncio server within this process."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from inference.v1 import generate_pb2 as pb
from inference.v1 import inference_pb2_grpc, info_pb2
from inference_service.config import ConfigError, Limits
from inference_service.rpc.auth import Authentication, Client, Tokens, load_tokens
from inference_service.rpc.caller import CALLER, ClientLimits

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"


def write(directory: Path, text: str) -> Path:
    path = directory / "tokens.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_token_finds_its_client_by_itself_or_by_its_digest(tmp_path: Path) -> None:
    digest = hashlib.sha256(BOB.encode()).hexdigest()
    path = write(tmp_path, f"- {{name: alice, token: {ALICE}, streams: 3}}\n- {{name: bob, token_sha256: {digest}}}\n")
    tokens = load_tokens(path, Limits(client_streams=7, client_tokens_per_min=100))
    alice, bob = tokens.find(ALICE), tokens.find(BOB)
    assert alice is not None and (alice.name, alice.limits) == ("alice", ClientLimits(3, 0.0, 100))
    assert bob is not None and (bob.name, bob.limits) == ("bob", ClientLimits(7, 0.0, 100))
    assert [tokens.find(each) for each in ("", ALICE[:-1], ALICE + "x", digest)] == [None] * 4
    assert ALICE not in repr(vars(tokens))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, tokn: 0123456789abcdef}", "[0]: Object contains unknown field `tokn`"),
        ("- {name: a}", "needs either token or token_sha256"),
        (f"- {{name: a, token: {ALICE}, token_sha256: '{'0' * 64}'}}", "needs either token or token_sha256"),
        ("- {name: a, token: topsecret}", "token must have at least 16"),
        ("- {name: a, token: 'topsecret with spaces in it'}", "printable ASCII characters, and no spaces"),
        ("- {name: a, token: 1234567890123456789}", "[0].token: Expected `str`"),
        ("- {name: a, token_sha256: topsecret}", "[0].token_sha256"),
        (f"- {{name: a, token: {ALICE}}}\n- {{name: a, token: {BOB}}}", "[1].name: is that of [0] too"),
        (f"- {{name: a, token: {ALICE}}}\n- {{name: b, token: {ALICE}}}", "[1].token: is that of [0] too"),
        (f"- {{name: 'a b', token: {ALICE}}}", "[0].name"),
        (f"- {{name: a, token: {ALICE}, streams: -1}}", "[0].streams"),
        ("topsecret: [", "line 1 is not YAML"),
        ("[" * 5000, "is not YAML"),
        (f"{{name: a, token: {ALICE}}}", "Expected `array`"),
        ("", "Expected `array`"),
        ("[]", "names no client"),
    ],
)
def test_a_wrong_file_is_an_error_that_quotes_no_token(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokens(write(tmp_path, text), Limits())
    assert str(caught.value).startswith(f"security.tokens_file: {tmp_path}/tokens.yaml: ")
    assert message in str(caught.value)
    assert not any(secret in str(caught.value) for secret in ("topsecret", ALICE, BOB))


def test_a_file_that_all_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, f"- {{name: alice, token: {ALICE}}}")
    with caplog.at_level(logging.WARNING):
        load_tokens(path, Limits())
        assert not caplog.records
        path.chmod(0o644)
        load_tokens(path, Limits())
    assert len(caplog.records) == 1 and "chmod o-r" in caplog.text


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.tokens_file: .*none\.yaml: No such file"):
        load_tokens(tmp_path / "none.yaml", Limits())


class Echo(inference_pb2_grpc.InferenceServiceServicer):
    """Says who calls, after others have had their turn."""

    async def Generate(self, request: Any, context: Any) -> None:
        for _ in range(3):
            await asyncio.sleep(0.001)
            await context.write(pb.GenerateResponse(accepted=pb.Accepted(request_id=_caller())))

    async def GetModelInfo(self, request: Any, context: Any) -> info_pb2.GetModelInfoResponse:
        return info_pb2.GetModelInfoResponse(name=_caller())


def _caller() -> str:
    caller = CALLER.get()
    return caller.name if caller else ""


@asynccontextmanager
async def served(refused: list[tuple[str, str]] | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """`refused` gets method and reason of each call that is."""
    told = [] if refused is None else refused
    tokens = Tokens([Client(name="alice", token=ALICE), Client(name="bob", token=BOB)], Limits())
    server = grpc.aio.server(interceptors=[Authentication(tokens, lambda method, _, error: told.append((method, error.reason)))])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Echo(), server)
    servicer = health.aio.HealthServicer()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]


async def test_handlers_know_their_own_caller() -> None:
    async with served() as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

        async def callers(token: str) -> set[str]:
            seen = {event.accepted.request_id async for event in stub.Generate(pb.GenerateRequest(), metadata=bearer(token))}
            return seen | {(await stub.GetModelInfo(info_pb2.GetModelInfoRequest(), metadata=bearer(token))).name}

        assert await asyncio.gather(*(callers(token) for token in (ALICE, BOB) * 10)) == [{"alice"}, {"bob"}] * 10


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ([], "MISSING_TOKEN"),
        ([("authorization", "")], "UNKNOWN_TOKEN"),
        ([("authorization", "Bearer")], "UNKNOWN_TOKEN"),
        ([("authorization", ALICE)], "UNKNOWN_TOKEN"),
        ([("authorization", f"Basic {ALICE}")], "UNKNOWN_TOKEN"),
        (bearer(ALICE[:-1]), "UNKNOWN_TOKEN"),
        (bearer(f" {ALICE}"), "UNKNOWN_TOKEN"),
        (bearer(ALICE.upper()), "UNKNOWN_TOKEN"),
        (bearer(ALICE) * 2, "UNKNOWN_TOKEN"),
        ([("authorization", f"bearer {ALICE}")], None),
    ],
)
async def test_only_a_known_token_is_let_in(metadata: list[tuple[str, str]], reason: str | None) -> None:
    told: list[tuple[str, str]] = []
    methods = ["/inference.v1.InferenceService/GetModelInfo", "/inference.v1.InferenceService/Generate"]
    async with served(told) as channel:
        calls: list[Any] = [channel.unary_unary(methods[0]), channel.unary_stream(methods[1])]
        for call in calls:
            error = await _error(call(b"", metadata=metadata, timeout=10))
            if reason is None:
                assert error is None
            else:
                assert error is not None and error.code() == grpc.StatusCode.UNAUTHENTICATED
                assert _reason(error) == reason
                assert ALICE not in error.details()
    assert told == ([(method, reason) for method in methods] if reason else [])


async def test_health_needs_no_token_and_other_services_do() -> None:
    async with served() as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for method in ("/no.such.Service/Method", "/grpc.health.v1.HealthX/Check"):
            call: Any = channel.unary_unary(method)
            error = await _error(call(b"", timeout=10))
            assert error is not None and error.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_that_never_sends_its_message_is_refused_all_the_same() -> None:
    async with served() as channel:
        call: Any = channel.stream_unary("/inference.v1.InferenceService/GetModelInfo")(timeout=10)
        assert await call.code() == grpc.StatusCode.UNAUTHENTICATED


async def _error(call: Any) -> Any:
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error
    return None


def _reason(error: grpc.aio.AioRpcError) -> str:
    (details,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    assert isinstance(details, bytes)
    info = error_details_pb2.ErrorInfo()
    status_pb2.Status.FromString(details).details[0].Unpack(info)
    return str(info.reason)
