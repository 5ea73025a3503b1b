"""OpenAI's completions and chat over HTTP and server-sent events as a target, in the dialect of one of several servers."""

from __future__ import annotations

import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import Any

import gevent  # type: ignore[import-untyped]
import msgspec

from inference_service.telemetry.tracing import ClientSpan, Tracing
from loadgen._openai_stream import read_stream, refusal
from loadgen._presets import Preset
from loadgen._target import ErrorClass, Failure, Model, Observation, Request, Takes, TargetError, end_span

_PROBE_S = 10.0
"""How long a target may take to say what it serves."""
_REUSE_S = 1.0
"""An idle connection is not used after so long, since its server may be closing it; uvicorn's does after 5 s."""


class _Meta(msgspec.Struct):
    n_vocab: int = 0


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    meta: _Meta | None = None
    """llama.cpp's."""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Info(msgspec.Struct):
    """TGI's and LoRAX's."""

    model_id: str
    max_total_tokens: int = 0


class _DeadlineExceeded(Exception):
    pass


class OpenAITarget:
    """`base` is the path of the API, such as /v1; `chat` says which of its two endpoints. Sockets must be gevent's; Locust sees to it."""

    protocol = "openai"

    def __init__(self, url: str, address: str, base: str, chat: bool, preset: Preset, timeout_s: float, tracing: Tracing) -> None:
        """`address` is the URL's HOST:PORT, `timeout_s` each request's deadline."""
        self._url = url
        self._address = address
        self._base = base
        self._path = f"{base}/chat/completions" if chat else f"{base}/completions"
        self._preset = preset
        self._timeout_s = timeout_s
        self._tracing = tracing
        self._model_name = ""
        self._idle: list[tuple[HTTPConnection, int]] = []
        self._asks_ids = bool(preset.return_ids) and (preset.chat_ids or not chat)
        self.takes = Takes(
            token_ids=preset.token_ids and not chat,
            text=not chat,
            messages=chat,
            exact=bool(preset.ignore_eos),
            answer_ids=self._asks_ids,
        )

    def model(self) -> Model:
        """The first of the API's list, or what the server's own path says. The vocabulary is told by llama.cpp alone."""
        path = self._preset.info or f"{self._base}/models"
        body = self._get(path)
        try:
            if self._preset.info:
                info = msgspec.json.decode(body, type=_Info)
                model = Model(info.model_id, 0, info.max_total_tokens, frozenset())
            else:
                first = msgspec.json.decode(body, type=_Models).data[0]
                model = Model(first.id, first.meta.n_vocab if first.meta else 0, first.max_model_len or 0, frozenset())
        except (msgspec.MsgspecError, IndexError):
            raise TargetError(f"target {self._url}: its answer to {path} is not a list of models") from None
        self._model_name = model.name
        return model

    def generate(self, request: Request, observation: Observation) -> None:
        body = self._body(request)
        observation.sent_ns = time.monotonic_ns()
        span = self._tracing.client_span(observation.sent_ns)
        connection = self._connection()
        reusable = False
        try:
            with gevent.Timeout(self._timeout_s, _DeadlineExceeded):
                connection.request("POST", self._path, body, _headers(span))
                response = connection.getresponse()
                if response.status == 200:
                    observation.failure = read_stream(response, request, observation)
                else:
                    observation.failure = refusal(response.status, response.read())
            observation.cut_off = False
            reusable = self._preset.keeps_connections and response.isclosed() and not response.will_close
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
            observation.model = self._model_name
            end_span(span, observation)

    def close(self) -> None:
        for connection, _ in self._idle:
            connection.close()
        self._idle.clear()

    def _get(self, path: str) -> bytes:
        try:
            with closing(HTTPConnection(self._address, timeout=_PROBE_S)) as connection:
                connection.request("GET", path)
                response = connection.getresponse()
                body = response.read()
        except (OSError, HTTPException) as error:
            raise TargetError(f"target {self._url} does not answer: {error}") from None
        if response.status != 200:
            raise TargetError(f"target {self._url} does not answer: HTTP {response.status} to {path}")
        return body

    def _connection(self) -> HTTPConnection:
        """The one used last, or a new one, which connects when it sends."""
        while self._idle:
            connection, since_ns = self._idle.pop()
            if time.monotonic_ns() - since_ns < _REUSE_S * 1e9:
                return connection
            connection.close()
        return HTTPConnection(self._address)

    def _body(self, request: Request) -> bytes:
        preset = self._preset
        fields: dict[str, Any] = {
            "model": self._model_name,
            "max_tokens": request.output_tokens,
            "temperature": request.temperature,
            **preset.neutral,
            "stream": True,
        }
        if request.messages:
            fields["messages"] = request.messages
        else:
            fields["prompt"] = request.text or request.token_ids
        if request.top_p < 1:
            fields["top_p"] = request.top_p
        if request.top_k:
            fields["top_k"] = request.top_k
        if request.seed is not None:
            fields["seed"] = request.seed
        if request.exact:
            fields[preset.ignore_eos] = True
        if self._asks_ids:
            fields[preset.return_ids] = True
        if preset.include_usage:
            fields["stream_options"] = {"include_usage": True}
            if preset.running_usage:
                fields["stream_options"]["continuous_usage_stats"] = True
        return msgspec.json.encode(fields)


def _headers(span: ClientSpan) -> dict[str, str]:
    return {"Content-Type": "application/json", **dict(span.metadata)}
