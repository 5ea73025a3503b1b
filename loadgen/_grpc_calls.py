"""What all gRPC targets have in common: how a channel is made, and the classes of status codes."""

from __future__ import annotations

import grpc

from loadgen._target import ErrorClass, Failure, TargetError

PROBE_S = 10.0
"""How long a target may take to say what it serves. A port where nobody listens says so at once."""
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.max_receive_message_length", -1)]
"""No retries behind our back: a failure must be seen, and a latency must be that of one call."""
_ERROR_CLASSES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorClass.QUEUE_FULL,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorClass.DEADLINE,
    grpc.StatusCode.CANCELLED: ErrorClass.CANCELLED,
    grpc.StatusCode.UNAVAILABLE: ErrorClass.TRANSPORT,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorClass.REQUEST,
    grpc.StatusCode.NOT_FOUND: ErrorClass.REQUEST,
    grpc.StatusCode.ALREADY_EXISTS: ErrorClass.REQUEST,
    grpc.StatusCode.PERMISSION_DENIED: ErrorClass.REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: ErrorClass.REQUEST,
    grpc.StatusCode.UNIMPLEMENTED: ErrorClass.REQUEST,
}


def open_channel(address: str) -> grpc.Channel:
    """`address` is HOST:PORT. Under gevent, gRPC must have been told so before."""
    return grpc.insecure_channel(address, options=_OPTIONS)


def failure_of(error: grpc.RpcError) -> Failure:
    code = error.code()
    return Failure(_ERROR_CLASSES.get(code, ErrorClass.SERVER), code.name, error.details() or "")


def no_answer(url: str, error: grpc.RpcError) -> TargetError:
    return TargetError(f"target {url} does not answer: {error.code().name}: {error.details()}")
