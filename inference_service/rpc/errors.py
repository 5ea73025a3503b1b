"""Errors as clients see them: a canonical status with google.rpc details."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "inference.v1"
MAX_MESSAGE = 300
"""Characters. A message may quote the request, and stands in the trailers three times: clients take 8 KiB, and each may be 23 bytes."""


OnRefused: TypeAlias = "Callable[[str, Iterable[tuple[str, str | bytes]], RpcError], None]"
"""Told of a call that is refused before its request is read: the method's path, the metadata, and the error."""


class RpcError(Exception):
    """Ends a call with a status.

    `reason` is a constant in UPPER_SNAKE_CASE that programs may compare, `field` the path of the field at fault, `retry_s` when to try
    again, where that can help, and `metadata` the figures behind it, for programs.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        field: str = "",
        retry_s: float = 0.0,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        self.field = field
        self.retry_s = retry_s
        self.metadata = metadata or {}

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The details, and for old clients the pushback that gRPC's own retries obey."""
        details: list[Message] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN, metadata=self.metadata)]
        if self.field:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message, reason=self.reason)
            details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        trailers: list[tuple[str, str | bytes]] = []
        if self.retry_s:
            milliseconds = ceil(self.retry_s * 1000)
            delay = Duration()
            delay.FromMilliseconds(milliseconds)
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
            trailers.append(("grpc-retry-pushback-ms", str(milliseconds)))
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return (("grpc-status-details-bin", status.SerializeToString()), *trailers)

    async def abort(self, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        """End the call. Raises grpc's own AbortError."""
        await context.abort(self.code, self.message, self.trailing_metadata())
        raise AssertionError("abort returns never")


def invalid(field: str, message: str) -> RpcError:
    """INVALID_ARGUMENT; the message says what `field` must be."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", f"{field}: {message}", field=field)


def unavailable(reason: str, message: str, retry_s: float = 0.0) -> RpcError:
    """UNAVAILABLE: another server may well answer."""
    return RpcError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_s=retry_s)
