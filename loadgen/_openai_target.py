"""OpenAI's completions over HTTP and server-sent events as a target, with the extensions of vLLM's that a fair measurement needs.

Prompts are token ids. `ignore_eos` makes the answer's length exact (`min_tokens` as well would make vLLM mask stop tokens at every step).
`return_token_ids` puts each chunk's token ids beside its text, which is empty where a token is no whole character: with random weights
that is often. Source: vLLM, vllm/entrypoints/openai/completion/protocol.py and serving.py (0.25).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse

import gevent  # type: ignore[import-untyped]
import msgspec

from inference_service.telemetry.tracing import ClientSpan, Tracing
from loadgen._target import ErrorClass, Failure, Model, Observation, Request, TargetError, end_span, miscount

_PROBE_S = 10.0
"""How long a target may take to say what it serves."""
_REUSE_S = 1.0
"""An idle connection is not used after so long, since its server may be closing it; uvicorn's does after 5 s."""
_ERROR_CLASSES = {
    408: ErrorClass.DEADLINE,
    429: ErrorClass.QUEUE_FULL,
    499: ErrorClass.CANCELLED,
    502: ErrorClass.TRANSPORT,
    503: ErrorClass.TRANSPORT,
    504: ErrorClass.DEADLINE,
}


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class _DeadlineExceeded(Exception):
    pass


class OpenAITarget:
    """`openai://HOST:PORT` or `http://HOST:PORT/v1`. Sockets must be gevent's, which Locust sees to."""

    protocol = "openai"

    def __init__(self, url: str, address: str, timeout_s: float, tracing: Tracing) -> None:
        """`address` is the URL's HOST:PORT, `timeout_s` each request's deadline."""
        self._url = url
        self._address = address
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._model_name = ""
        self._idle: list[tuple[HTTPConnection, int]] = []

    def model(self) -> Model:
        """The first of /v1/models. The protocol does not tell the vocabulary."""
        connection = HTTPConnection(self._address, timeout=_PROBE_S)
        try:
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise TargetError(f"target {self._url} does not answer: HTTP {response.status} to /v1/models")
            model = msgspec.json.decode(body, type=_Models).data[0]
        except (OSError, HTTPException) as error:
            raise TargetError(f"target {self._url} does not answer: {error}") from None
        except (msgspec.MsgspecError, IndexError):
            raise TargetError(f"target {self._url}: its answer to /v1/models is not a list of models") from None
        finally:
            connection.close()
        self._model_name = model.id
        return Model(model.id, 0, model.max_model_len or 0, frozenset())

    def generate(self, request: Request, observation: Observation) -> None:
        body = self._body(request)
        observation.sent_ns = time.monotonic_ns()
        span = self._tracing.client_span(observation.sent_ns)
        connection = self._connection()
        reusable = False
        try:
            with gevent.Timeout(self._timeout_s, _DeadlineExceeded):
                connection.request("POST", "/v1/completions", body, _headers(span))
                response = connection.getresponse()
                if response.status == 200:
                    observation.failure = _read_stream(response, request, observation)
                else:
                    observation.failure = _refusal(response.status, response.read())
            observation.cut_off = False
            reusable = response.isclosed() and not response.will_close
        except _DeadlineExceeded:
            observation.failure = Failure(ErrorClass.DEADLINE, "DEADLINE_EXCEEDED", f"longer than {self._timeout_s} s")
            observation.cut_off = False
        except (OSError, HTTPException) as error:
            observation.failure = Failure(ErrorClass.TRANSPORT, type(error).__name__, str(error))
            observation.cut_off = False
        finally:
            observation.ended_ns = time.monotonic_ns()
            if reusable:
                self._idle.append((connection, observation.ended_ns))
            else:
                # Where the greenlet is killed in the middle, this is what ends the request at the server.
                connection.close()
            end_span(span, observation, "", self._model_name)

    def close(self) -> None:
        for connection, _ in self._idle:
            connection.close()
        self._idle.clear()

    def _connection(self) -> HTTPConnection:
        """The one used last, or a new one, which connects when it sends."""
        while self._idle:
            connection, since_ns = self._idle.pop()
            if time.monotonic_ns() - since_ns < _REUSE_S * 1e9:
                return connection
            connection.close()
        return HTTPConnection(self._address)

    def _body(self, request: Request) -> bytes:
        fields = {
            "model": self._model_name,
            "prompt": request.token_ids,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            # Every field that shapes the draw is given, so that no default of the model's changes the work between targets.
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        return msgspec.json.encode(fields if request.seed is None else {**fields, "seed": request.seed})


def _headers(span: ClientSpan) -> dict[str, str]:
    return {"Content-Type": "application/json", **dict(span.metadata)}


def _read_stream(response: HTTPResponse, request: Request, observation: Observation) -> Failure | None:
    """Note what arrives until the stream's end; how it broke the protocol, if it did."""
    usage: _Usage | None = None
    has_ids = done = False
    observation.input_tokens = len(request.token_ids)
    for data in _events(response):
        received_ns = time.monotonic_ns()
        if data == b"[DONE]":
            done = True
            continue
        try:
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError as error:
            return Failure(ErrorClass.SERVER, "PROTOCOL", f"not a chunk of a completion: {error}")
        if chunk.error:
            code = chunk.error.code
            return _failure(code if isinstance(code, int) else 500, chunk.error.message)
        for choice in chunk.choices:
            has_ids = has_ids or choice.token_ids is not None
            # Without ids the least that a text can be.
            tokens = int(choice.text != "") if choice.token_ids is None else len(choice.token_ids)
            if tokens:
                observation.arrivals.append((received_ns, tokens))
        usage = chunk.usage or usage
    if not done or usage is None:
        return Failure(ErrorClass.SERVER, "PROTOCOL", f"the stream ended without {'usage' if done else '[DONE]'}")
    observation.input_tokens = usage.prompt_tokens
    if usage.prompt_tokens_details:
        observation.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    if not has_ids:
        _credit_rest(observation, usage.completion_tokens)
    if (sent := len(request.token_ids)) != usage.prompt_tokens:
        return Failure(ErrorClass.SERVER, "PROTOCOL", f"{sent} token ids sent, but usage.prompt_tokens is {usage.prompt_tokens}")
    return miscount(observation, request, usage.completion_tokens)


def _credit_rest(observation: Observation, completion_tokens: int) -> None:
    """A server without token ids does not say in which chunk the rest came: give it to the last, so that the sum is right."""
    if observation.arrivals and completion_tokens > observation.output_tokens:
        received_ns, tokens = observation.arrivals[-1]
        observation.arrivals[-1] = (received_ns, tokens + completion_tokens - observation.output_tokens)


def _events(response: HTTPResponse) -> Iterator[bytes]:
    """The data of each server-sent event, as soon as its line is here; these APIs have one line an event."""
    rest = b""
    while part := response.read1():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _refusal(status: int, body: bytes) -> Failure:
    try:
        error = _decode_chunk(body).error
    except msgspec.MsgspecError:
        error = None
    return _failure(status, error.message if error else body[:200].decode(errors="replace"))


def _failure(status: int, message: str) -> Failure:
    fallback = ErrorClass.REQUEST if 400 <= status < 500 else ErrorClass.SERVER
    return Failure(_ERROR_CLASSES.get(status, fallback), f"HTTP {status}", message)
