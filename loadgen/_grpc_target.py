"""Our own gRPC API as a target: the synchronous stub, many streams over one channel, under gevent."""

from __future__ import annotations

import time

import grpc

from inference.v1 import generate_pb2, inference_pb2_grpc, info_pb2
from inference_service.telemetry.tracing import Tracing
from loadgen._target import ErrorClass, Failure, Model, Observation, Request, TargetError, end_span, miscount

_PROBE_S = 10.0
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


class GrpcTarget:
    """`grpc://HOST:PORT`, where inference.v1.InferenceService listens. Under gevent, gRPC must have been told so before."""

    protocol = "grpc"

    def __init__(self, url: str, address: str, timeout_s: float, tracing: Tracing) -> None:
        """`address` is the URL's HOST:PORT, `timeout_s` each request's deadline."""
        self._url = url
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._model_name = ""
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def model(self) -> Model:
        try:
            info = self._stub.GetModelInfo(info_pb2.GetModelInfoRequest(), timeout=_PROBE_S)
        except grpc.RpcError as error:
            raise TargetError(f"target {self._url} does not answer: {error.code().name}: {error.details()}") from None
        self._model_name = info.name
        return Model(info.name, info.vocab_size, info.max_context, frozenset(info.eos_token_ids))

    def generate(self, request: Request, observation: Observation) -> None:
        message = _message(request)
        observation.sent_ns = time.monotonic_ns()
        span = self._tracing.client_span(observation.sent_ns)
        call = self._stub.Generate(message, timeout=self._timeout_s, metadata=span.metadata)
        request_id = ""
        finished: generate_pb2.Finished | None = None
        try:
            for response in call:
                received_ns = time.monotonic_ns()
                event = response.WhichOneof("event")
                if event == "delta":
                    if response.delta.token_ids:
                        observation.arrivals.append((received_ns, len(response.delta.token_ids)))
                elif event == "accepted":
                    request_id = response.accepted.request_id
                    observation.input_tokens = response.accepted.prompt_tokens
                    observation.cached_tokens = response.accepted.cached_tokens
                elif event == "finished":
                    finished = response.finished
            observation.failure = _breach(observation, request, finished)
            observation.cut_off = False
        except grpc.RpcError as error:
            code = error.code()
            observation.failure = Failure(_ERROR_CLASSES.get(code, ErrorClass.SERVER), code.name, error.details() or "")
            observation.cut_off = False
        finally:
            observation.ended_ns = time.monotonic_ns()
            # Nothing to do after the end of a stream; where the greenlet is killed in the middle, this is what ends the call.
            call.cancel()
            end_span(span, observation, request_id, self._model_name)

    def close(self) -> None:
        self._channel.close()


def _message(request: Request) -> generate_pb2.GenerateRequest:
    return generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=request.token_ids),
        # Every field that shapes the draw is given, so that no default of the model's changes the work between targets.
        sampling=generate_pb2.SamplingParams(temperature=request.temperature, top_k=0, top_p=request.top_p, min_p=0.0, seed=request.seed),
        stopping=generate_pb2.StopConditions(max_tokens=request.output_tokens, ignore_eos=True),
    )


def _breach(observation: Observation, request: Request, finished: generate_pb2.Finished | None) -> Failure | None:
    """How an answer that ended with OK broke the protocol, if it did."""
    if finished is None:
        return Failure(ErrorClass.SERVER, "PROTOCOL", "the stream ended without Finished")
    if finished.reason == generate_pb2.FINISH_REASON_ABORTED:
        return Failure(ErrorClass.CANCELLED, "ABORTED", "somebody called Abort")
    return miscount(observation, request, finished.usage.completion_tokens)
