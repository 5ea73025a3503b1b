"""Calls whose request is no message of its type, or never comes: they end with a status as any other faulty call does.

grpc.aio itself ends a call of bytes that cannot be parsed with UNKNOWN and a traceback in the log, leaves one without any message
unanswered, and waits for ever for one that is only begun. So the methods are registered as ones that take a stream of requests, whose one
message is read here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from inference_service.rpc.caller import CALLER
from inference_service.rpc.errors import OnRefused, RpcError

Context = grpc.aio.ServicerContext[Any, Any]
Behavior = Callable[[Any, Context], Any]

REQUEST_S = 30.0
"""How long a request may take to come after its call began."""
AT_ONCE = 32
"""Requests of one token that are read at the same time; others wait. What has come of a request takes memory, and limits of clients count
only calls whose request is whole."""


class Registrar:
    """Takes the place of a server where a generated `add_...Servicer_to_server` wants one."""

    def __init__(self, server: grpc.aio.Server, on_refused: OnRefused = lambda method, metadata, error: None) -> None:
        """`on_refused` is told of each call that ends without its request."""
        self._server = server
        self._on_refused = on_refused
        self._turns: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The same handlers come by their names, too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        checked = {name: self._checked(handler, f"/{service}/{name}") for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, checked),))

    def _checked(self, handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
        assert not handler.request_streaming
        make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
        behavior: Behavior = handler.unary_stream or handler.unary_unary

        async def behave(requests: Any, context: Context) -> Any:
            try:
                try:
                    caller = CALLER.get()
                    request = await read(context, self._turns[caller.name] if caller else nullcontext())
                except RpcError as error:
                    self._on_refused(method, context.invocation_metadata() or (), error)
                    await error.abort(context)
                return await behavior(request, context)
            except grpc.aio.InternalError:
                # The connection is gone, and gRPC has yet to cancel the call.
                raise asyncio.CancelledError from None

        return make(behave, handler.request_deserializer, handler.response_serializer)


async def read(context: Context, turn: AbstractAsyncContextManager[None]) -> Any:
    """The call's request, once it is its turn. Raises RpcError where there is none."""
    try:
        async with asyncio.timeout(REQUEST_S), turn:
            request = await context.read()
    except DecodeError as error:
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", str(error)) from None
    except TimeoutError:
        raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "NO_REQUEST", f"no request came within {REQUEST_S:g} s") from None
    if request is grpc.aio.EOF:
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", "the call ended without a whole request")
    return request
