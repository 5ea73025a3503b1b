"""What all gRPC targets have in common: how a channel is made, a call's course, and the classes of status codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from inference_service.balancing import spread
from inference_service.channel import Metadata, split_target
from inference_service.telemetry.tracing import Tracing
from loadgen._target import ErrorClass, Failure, Observation, TargetError, end_span

PROBE_S = 10.0
"""How long a target may take to say what it serves. A port where nobody listens says so at once."""
_OPTIONS = [("grpc.enable_retries", 0), ("grpc.max_receive_message_length", -1), spread(retries=False)]
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


def open_channel(target: str) -> grpc.Channel:
    """`target` is [grpc[s]://]HOST:PORT. Under gevent, gRPC must have been told so before."""
    address, secure = split_target(target)
    if secure:
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(), options=_OPTIONS)
    return grpc.insecure_channel(address, options=_OPTIONS)


def observe(
    method: Any,
    message: Any,
    timeout_s: float,
    tracing: Tracing,
    observation: Observation,
    read: Callable[[Iterator[Any]], Failure | None],
    metadata: Metadata = (),
) -> None:
    """One call of a streaming method: `read` takes its responses in, and says what is wrong with an answer whose status is OK."""
    observation.sent_ns = time.monotonic_ns()
    span = tracing.client_span(observation.sent_ns)
    call = method(message, timeout=timeout_s, metadata=(*span.metadata, *metadata))
    try:
        observation.failure = read(call)
        observation.cut_off = False
    except grpc.RpcError as error:
        observation.failure = _failure(error)
        observation.cut_off = False
    finally:
        # The status that follows the last message says nothing about the answer, and costs the client as much as a message.
        observation.ended_ns = observation.ended_ns or time.monotonic_ns()
        # Nothing to do after the end of a stream; where the greenlet is killed in the middle, this is what ends the call.
        call.cancel()
        end_span(span, observation)


def _failure(error: grpc.RpcError) -> Failure:
    code = error.code()
    return Failure(_ERROR_CLASSES.get(code, ErrorClass.SERVER), code.name, error.details() or "")


def no_answer(url: str, error: grpc.RpcError) -> TargetError:
    return TargetError(f"target {url} does not answer: {error.code().name}: {error.details()}")
