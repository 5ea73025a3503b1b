"""A Python client: `Client` for threads, `AioClient` for asyncio. Both have the same methods.

    with Client("127.0.0.1:50051") as client:
        client.wait_ready(60)
        print(client.generate_text("The capital of France is", max_tokens=8).text)
        for event in client.generate([{"role": "user", "content": "Hello"}], temperature=0, stop=["\\n"]):
            if event.HasField("delta"):
                print(event.delta.text, end="")

A prompt is text, a conversation (mappings with `role` and `content`) or token ids. Keyword arguments are the fields of GenerateRequest and
of its parts, by their names (`temperature`, `max_tokens`, `logprobs`, `add_generation_prompt`, `request_id`, ...); None is absent, and an
unknown name is a TypeError. What the server or the connection refuses is an InferenceError.

A target is HOST:PORT or grpc://HOST:PORT, and grpcs://HOST:PORT for TLS. `token` is the bearer token, where the server asks for one;
without it, that of the environment's INFERENCE_TOKEN is sent, to whatever the target is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference.v1 import generate_pb2, inference_pb2_grpc, info_pb2
from inference_service.balancing import spread
from inference_service.channel import Metadata, authorization, split_target
from inference_service.client_messages import (
    Completion,
    Completions,
    Conversation,
    InferenceError,
    Prompt,
    generate_request,
    inference_error,
    tokenize_request,
)

__all__ = ["AioClient", "Client", "Completion", "InferenceError"]

SERVICE = "inference.v1.InferenceService"

_OPTIONS = [("grpc.max_reconnect_backoff_ms", 1000), ("grpc.max_receive_message_length", -1), spread()]
_POLL_S = 0.1
_READINESS = health_pb2.HealthCheckRequest(service=SERVICE)


class Client:
    """A blocking client; one may serve many threads. Close it, or use it as a context manager."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None, token: str | None = None) -> None:
        """`credentials` are for TLS with other certificates than grpcs:// has: an authority of one's own, or a client's certificate."""
        address, credentials = _open(target, credentials)
        self._authorization = authorization(token)
        self._channel = grpc.secure_channel(address, credentials, _OPTIONS) if credentials else grpc.insecure_channel(address, _OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, traceparent: str = "", **fields: Any
    ) -> Iterator[generate_pb2.GenerateResponse]:
        """Stream an answer: an `accepted` event, `delta`s, `finished`. Closing the iterator cancels the request.

        `timeout` is the call's deadline in seconds; `traceparent` the W3C header of the caller's span.
        """
        request = generate_request(prompt, **fields)
        return _stream(self._stub.Generate(request, timeout=timeout, metadata=_metadata(traceparent, self._authorization)))

    def generate_text(self, prompt: Prompt, *, timeout: float | None = None, traceparent: str = "", **fields: Any) -> Completion:
        """The whole answer at once; of several choices the first, see `generate_choices`."""
        return self.generate_choices(prompt, timeout=timeout, traceparent=traceparent, **fields)[0]

    def generate_choices(self, prompt: Prompt, *, timeout: float | None = None, traceparent: str = "", **fields: Any) -> list[Completion]:
        """All `n` answers at once."""
        completions = Completions()
        for event in self.generate(prompt, timeout=timeout, traceparent=traceparent, **fields):
            completions.add(event)
        return completions.checked(fields.get("n") or 1)

    def abort(self, request_id: str) -> bool:
        """End a request in flight; with a token, one of this token's. False: there is none of that id."""
        with _errors():
            return bool(self._stub.Abort(generate_pb2.AbortRequest(request_id=request_id), metadata=self._authorization).found)

    def tokenize(self, prompt: str | Conversation, **fields: Any) -> list[int]:
        """The token ids that `generate` would compute; `fields` are TokenizeRequest's and ChatPrompt's."""
        with _errors():
            return list(self._stub.Tokenize(tokenize_request(prompt, **fields), metadata=self._authorization).token_ids)

    def detokenize(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = generate_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        with _errors():
            return str(self._stub.Detokenize(request, metadata=self._authorization).text)

    def model_info(self) -> info_pb2.GetModelInfoResponse:
        """What is served."""
        with _errors():
            answer: info_pb2.GetModelInfoResponse = self._stub.GetModelInfo(info_pb2.GetModelInfoRequest(), metadata=self._authorization)
        return answer

    def server_info(self) -> info_pb2.GetServerInfoResponse:
        """By what, and with which limits."""
        with _errors():
            answer: info_pb2.GetServerInfoResponse = self._stub.GetServerInfo(info_pb2.GetServerInfoRequest(), metadata=self._authorization)
        return answer

    def load(self) -> info_pb2.GetLoadResponse:
        """How busy the server is."""
        with _errors():
            answer: info_pb2.GetLoadResponse = self._stub.GetLoad(info_pb2.GetLoadRequest(), metadata=self._authorization)
        return answer

    def drain(self) -> int:
        """Start the server's drain. Gives the number of requests still in flight."""
        with _errors():
            return int(self._stub.Drain(info_pb2.DrainRequest(), metadata=self._authorization).in_flight)

    def wait_ready(self, timeout: float) -> None:
        """Wait until the server takes requests. Raises InferenceError (DEADLINE_EXCEEDED) after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._is_serving(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                raise _not_ready(timeout)
            time.sleep(_POLL_S)

    def _is_serving(self, timeout: float) -> bool:
        try:
            answer = self._health.Check(_READINESS, timeout=max(0.0, timeout), wait_for_ready=True)
        except grpc.RpcError as error:
            return _not_yet(error)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def close(self) -> None:
        """Close the connection; what is in flight is cancelled."""
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class AioClient:
    """The same for asyncio: make it within a running loop; `async with` closes it."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None, token: str | None = None) -> None:
        """See Client."""
        address, credentials = _open(target, credentials)
        self._authorization = authorization(token)
        self._channel = (
            grpc.aio.secure_channel(address, credentials, _OPTIONS) if credentials else grpc.aio.insecure_channel(address, _OPTIONS)
        )
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, traceparent: str = "", **fields: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        """Stream an answer; see Client.generate."""
        request = generate_request(prompt, **fields)
        return _aio_stream(lambda: self._stub.Generate(request, timeout=timeout, metadata=_metadata(traceparent, self._authorization)))

    async def generate_text(self, prompt: Prompt, *, timeout: float | None = None, traceparent: str = "", **fields: Any) -> Completion:
        """See Client.generate_text."""
        return (await self.generate_choices(prompt, timeout=timeout, traceparent=traceparent, **fields))[0]

    async def generate_choices(
        self, prompt: Prompt, *, timeout: float | None = None, traceparent: str = "", **fields: Any
    ) -> list[Completion]:
        """See Client.generate_choices."""
        completions = Completions()
        async for event in self.generate(prompt, timeout=timeout, traceparent=traceparent, **fields):
            completions.add(event)
        return completions.checked(fields.get("n") or 1)

    async def abort(self, request_id: str) -> bool:
        """See Client.abort."""
        with _errors():
            return bool((await self._stub.Abort(generate_pb2.AbortRequest(request_id=request_id), metadata=self._authorization)).found)

    async def tokenize(self, prompt: str | Conversation, **fields: Any) -> list[int]:
        """See Client.tokenize."""
        request = tokenize_request(prompt, **fields)
        with _errors():
            return list((await self._stub.Tokenize(request, metadata=self._authorization)).token_ids)

    async def detokenize(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """See Client.detokenize."""
        request = generate_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        with _errors():
            return str((await self._stub.Detokenize(request, metadata=self._authorization)).text)

    async def model_info(self) -> info_pb2.GetModelInfoResponse:
        """See Client.model_info."""
        with _errors():
            request = info_pb2.GetModelInfoRequest()
            answer: info_pb2.GetModelInfoResponse = await self._stub.GetModelInfo(request, metadata=self._authorization)
        return answer

    async def server_info(self) -> info_pb2.GetServerInfoResponse:
        """See Client.server_info."""
        with _errors():
            request = info_pb2.GetServerInfoRequest()
            answer: info_pb2.GetServerInfoResponse = await self._stub.GetServerInfo(request, metadata=self._authorization)
        return answer

    async def load(self) -> info_pb2.GetLoadResponse:
        """See Client.load."""
        with _errors():
            answer: info_pb2.GetLoadResponse = await self._stub.GetLoad(info_pb2.GetLoadRequest(), metadata=self._authorization)
        return answer

    async def drain(self) -> int:
        """See Client.drain."""
        with _errors():
            return int((await self._stub.Drain(info_pb2.DrainRequest(), metadata=self._authorization)).in_flight)

    async def wait_ready(self, timeout: float) -> None:
        """See Client.wait_ready."""
        deadline = time.monotonic() + timeout
        while not await self._is_serving(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                raise _not_ready(timeout)
            await asyncio.sleep(_POLL_S)

    async def _is_serving(self, timeout: float) -> bool:
        try:
            answer = await self._health.Check(_READINESS, timeout=max(0.0, timeout), wait_for_ready=True)
        except grpc.RpcError as error:
            return _not_yet(error)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def close(self) -> None:
        """See Client.close."""
        await self._channel.close()

    async def __aenter__(self) -> AioClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.close()


def _stream(call: Any) -> Iterator[generate_pb2.GenerateResponse]:
    try:
        with _errors():
            yield from call
    finally:
        call.cancel()


async def _aio_stream(start: Callable[[], Any]) -> AsyncIterator[generate_pb2.GenerateResponse]:
    """Starts the call when the first event is asked for: one that is never iterated has nothing to clean up."""
    call = start()
    try:
        with _errors():
            async for event in call:
                yield event
    finally:
        call.cancel()


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise inference_error(error) from None


def _not_yet(error: Any) -> bool:
    """False, where the error of a health check may pass with time; raises it where not."""
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED):
        return False
    raise inference_error(error) from None


def _not_ready(timeout: float) -> InferenceError:
    return InferenceError(grpc.StatusCode.DEADLINE_EXCEEDED, f"the server is not ready after {timeout:g} s")


def _open(target: str, credentials: grpc.ChannelCredentials | None) -> tuple[str, grpc.ChannelCredentials | None]:
    address, secure = split_target(target)
    return address, credentials or (grpc.ssl_channel_credentials() if secure else None)


def _metadata(traceparent: str, further: Metadata) -> Metadata:
    return (("traceparent", traceparent), *further) if traceparent else further
