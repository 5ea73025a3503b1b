"""The peers' own gRPC servers as targets: vLLM's, SGLang's and TensorRT-LLM's, which the Shepherd Model Gateway defines.

Source, not recorded: the .proto files in the Python package smg-grpc-proto 0.4.28, whose stubs are used here. All three stream chunks with
new token ids, and then one `complete` with the counts; where a server sends its last tokens in that alone, they arrive with it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import grpc

from inference_service.telemetry.tracing import Tracing
from loadgen._grpc_calls import PROBE_S, no_answer, observe, open_channel
from loadgen._target import ErrorClass, Failure, Model, Observation, Request, Takes, TargetError, miscount


@dataclass(frozen=True, slots=True)
class Dialect:
    """One server's service. Messages are of a module without types."""

    module: str
    service: str
    message: Callable[[Any, Request], Any]
    """The module and a request -> its GenerateRequest."""
    model: Callable[[Any], Model]
    """Of its GetModelInfoResponse."""
    takes: Takes


class PeerGrpcTarget:
    """`vllm+grpc://HOST:PORT`, `sglang+grpc://...`, `trtllm+grpc://...`. Under gevent, gRPC must have been told so before."""

    protocol = "grpc"

    def __init__(self, url: str, address: str, dialect: Dialect, timeout_s: float, tracing: Tracing) -> None:
        """`address` is the URL's HOST:PORT, `timeout_s` each request's deadline. Raises TargetError without the stubs' package."""
        try:
            self._messages: Any = import_module(f"smg_grpc_proto.generated.{dialect.module}_pb2")
            services: Any = import_module(f"smg_grpc_proto.generated.{dialect.module}_pb2_grpc")
        except ImportError as error:
            raise TargetError(f"target {url}: {error}; the package smg-grpc-proto is in inference-service's extra `loadgen`") from None
        self.takes = dialect.takes
        self._url = url
        self._dialect = dialect
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._model_name = ""
        self._channel = open_channel(address)
        self._stub = getattr(services, f"{dialect.service}Stub")(self._channel)

    def model(self) -> Model:
        try:
            model = self._dialect.model(self._stub.GetModelInfo(self._messages.GetModelInfoRequest(), timeout=PROBE_S))
        except grpc.RpcError as error:
            raise no_answer(self._url, error) from None
        self._model_name = model.name
        return model

    def generate(self, request: Request, observation: Observation) -> None:
        message = self._dialect.message(self._messages, request)
        message.request_id = observation.request_id = uuid.uuid4().hex
        observation.model = self._model_name

        def read(responses: Iterator[Any]) -> Failure | None:
            return _breach(observation, request, _read(responses, observation))

        observe(self._stub.Generate, message, self._timeout_s, self._tracing, observation, read)

    def close(self) -> None:
        self._channel.close()


def _read(responses: Iterator[Any], observation: Observation) -> Any:
    """Note what comes and when; the last message, if there was one."""
    complete = None
    for response in responses:
        received_ns = time.monotonic_ns()
        if response.WhichOneof("response") == "chunk":
            _note_tokens(observation, received_ns, response.chunk.token_ids)
        else:
            complete = response.complete
            observation.ended_ns = received_ns
            _note_last(observation, received_ns, complete)
    return complete


def _note_tokens(observation: Observation, received_ns: int, token_ids: Any) -> None:
    if token_ids:
        observation.arrivals.append((received_ns, len(token_ids)))
        observation.answer_ids.extend(token_ids)


def _note_last(observation: Observation, received_ns: int, complete: Any) -> None:
    observation.input_tokens, observation.cached_tokens = complete.prompt_tokens, complete.cached_tokens
    # TensorRT-LLM's name, and the others'. It has all ids of the answer, or those that no chunk had.
    ids = complete.output_token_ids if hasattr(complete, "output_token_ids") else complete.output_ids
    counted = observation.output_tokens
    if len(ids) != complete.completion_tokens - counted:
        ids = ids[counted:]
    _note_tokens(observation, received_ns, ids)


def _breach(observation: Observation, request: Request, complete: Any) -> Failure | None:
    """How an answer that ended with OK is wrong, if it is."""
    if complete is None:
        return Failure(ErrorClass.SERVER, "PROTOCOL", "the stream ended without GenerateComplete")
    if complete.finish_reason == "abort":
        return Failure(ErrorClass.CANCELLED, "ABORTED", "finish_reason is abort")
    if complete.finish_reason == "error":
        return Failure(ErrorClass.SERVER, "ERROR", "finish_reason is error")
    return miscount(observation, request, complete.completion_tokens)


def _vllm_message(messages: Any, request: Request) -> Any:
    message = messages.GenerateRequest(
        stream=True,
        sampling_params=messages.SamplingParams(
            max_tokens=request.output_tokens,
            ignore_eos=request.exact,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            repetition_penalty=1.0,
            seed=request.seed,
            n=1,
        ),
    )
    if request.text:
        message.text = request.text
    else:
        message.tokenized.input_ids.extend(request.token_ids)
    return message


def _sglang_message(messages: Any, request: Request) -> Any:
    """It has no field for a seed, and -1 is its top-k of all tokens."""
    return messages.GenerateRequest(
        stream=True,
        tokenized=messages.TokenizedInput(input_ids=request.token_ids),
        sampling_params=messages.SamplingParams(
            max_new_tokens=request.output_tokens,
            ignore_eos=request.exact,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or -1,
            repetition_penalty=1.0,
            n=1,
        ),
    )


def _trtllm_message(messages: Any, request: Request) -> Any:
    return messages.GenerateRequest(
        streaming=True,
        tokenized=messages.TokenizedInput(input_token_ids=request.token_ids),
        max_tokens=request.output_tokens,
        ignore_eos=request.exact,
        sampling_config=messages.SamplingConfig(
            beam_width=1,
            num_return_sequences=1,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
        ),
        output_config=messages.OutputConfig(exclude_input_from_output=True),
    )


def _model(info: Any) -> Model:
    """vLLM's and SGLang's."""
    name = info.served_model_name or info.model_path
    return Model(name, info.vocab_size, info.max_context_length, frozenset(info.eos_token_ids))


def _trtllm_model(info: Any) -> Model:
    return Model(info.model_id, info.vocab_size, info.max_seq_len, frozenset())


DIALECTS = {
    "vllm": Dialect("vllm_engine", "VllmEngine", _vllm_message, _model, Takes()),
    "sglang": Dialect("sglang_scheduler", "SglangScheduler", _sglang_message, _model, Takes(text=False)),
    "trtllm": Dialect("trtllm_service", "TrtllmService", _trtllm_message, _trtllm_model, Takes(text=False)),
}
"""By the name that a target's URL begins with."""
