"""Our own gRPC API as a target: the synchronous stub, many streams over one channel, under gevent."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc

from inference.v1 import generate_pb2, inference_pb2_grpc, info_pb2
from inference_service.channel import authorization
from inference_service.telemetry.tracing import Tracing
from loadgen._grpc_calls import PROBE_S, no_answer, observe, open_channel
from loadgen._target import ErrorClass, Failure, Model, Observation, Request, Takes, TargetError, miscount


class GrpcTarget:
    """`grpc[s]://HOST:PORT[/chat]`, where inference.v1.InferenceService listens. Under gevent, gRPC must have been told so before.

    A token is taken from the environment: see inference_service/channel.py.
    """

    protocol = "grpc"

    def __init__(self, url: str, address: str, chat: bool, timeout_s: float, tracing: Tracing) -> None:
        """`address` is the URL's grpc[s]://HOST:PORT, `timeout_s` each request's deadline."""
        self.takes = Takes(token_ids=not chat, text=not chat, messages=chat)
        self._url = url
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._model_name = ""
        try:
            self._authorization = authorization()
        except ValueError as error:
            raise TargetError(f"target {url}: {error}") from None
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def model(self) -> Model:
        try:
            info = self._stub.GetModelInfo(info_pb2.GetModelInfoRequest(), timeout=PROBE_S, metadata=self._authorization)
        except grpc.RpcError as error:
            raise no_answer(self._url, error) from None
        self._model_name = info.name
        return Model(info.name, info.vocab_size, info.max_context, frozenset(info.eos_token_ids))

    def generate(self, request: Request, observation: Observation) -> None:
        observation.model = self._model_name

        def read(responses: Iterator[generate_pb2.GenerateResponse]) -> Failure | None:
            return _breach(observation, request, _read(responses, observation))

        observe(self._stub.Generate, _message(request), self._timeout_s, self._tracing, observation, read, self._authorization)

    def close(self) -> None:
        self._channel.close()


def _read(responses: Iterator[generate_pb2.GenerateResponse], observation: Observation) -> generate_pb2.Finished | None:
    """Note what comes and when; the last message, if there was one."""
    finished = None
    for response in responses:
        received_ns = time.monotonic_ns()
        event = response.WhichOneof("event")
        if event == "delta":
            delta = response.delta
            if delta.token_ids:
                observation.arrivals.append((received_ns, len(delta.token_ids)))
                observation.answer_ids.extend(delta.token_ids)
            observation.answer_text.append(delta.text)
        elif event == "accepted":
            observation.request_id = response.accepted.request_id
            observation.input_tokens = response.accepted.prompt_tokens
            observation.cached_tokens = response.accepted.cached_tokens
        elif event == "finished":
            finished = response.finished
            observation.ended_ns = received_ns
            _note_timings(finished.timings, observation)
    return finished


def _message(request: Request) -> generate_pb2.GenerateRequest:
    message = generate_pb2.GenerateRequest(
        # Every field that shapes the draw is given, so that no default of the model's changes the work between targets.
        sampling=generate_pb2.SamplingParams(
            temperature=request.temperature, top_k=request.top_k, top_p=request.top_p, min_p=0.0, seed=request.seed
        ),
        stopping=generate_pb2.StopConditions(max_tokens=request.output_tokens, ignore_eos=request.exact),
    )
    if request.messages:
        message.chat.messages.extend(generate_pb2.ChatMessage(role=said.role, content=said.content) for said in request.messages)
    elif request.text:
        message.text = request.text
    else:
        message.token_ids.ids.extend(request.token_ids)
    return message


def _note_timings(timings: generate_pb2.Timings, observation: Observation) -> None:
    if timings.queued_unix_ns and timings.first_token_unix_ns:
        observation.queue_ns = max(1, timings.scheduled_unix_ns - timings.queued_unix_ns)
        observation.server_ttft_ns = timings.first_token_unix_ns - timings.queued_unix_ns


def _breach(observation: Observation, request: Request, finished: generate_pb2.Finished | None) -> Failure | None:
    """How an answer that ended with OK broke the protocol, if it did."""
    if finished is None:
        return Failure(ErrorClass.SERVER, "PROTOCOL", "the stream ended without Finished")
    if finished.reason == generate_pb2.FINISH_REASON_ABORTED:
        return Failure(ErrorClass.CANCELLED, "ABORTED", "somebody called Abort")
    return miscount(observation, request, finished.usage.completion_tokens)
