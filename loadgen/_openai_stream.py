"""Reads the answers of OpenAI's completions and chat APIs: server-sent events, and errors.

What counts as a token, and when:
- A chunk brings tokens if it has token ids, or text, be it of the answer or of its reasoning. The first such chunk is the first token: one
  that only tells the role, or is empty, is none.
- It brings as many as it has ids; else as many as its usage says there are more now, where chunks have one; else one.
- The trailing usage says how many there were in all. Without ids, what it has more is of the last chunk.
- A stream has ended well with [DONE], or once a finish_reason and the usage are there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Annotated

import msgspec

from loadgen._target import ErrorClass, Failure, Observation, Request, miscount

_ERROR_CLASSES = {
    408: ErrorClass.DEADLINE,
    429: ErrorClass.QUEUE_FULL,
    499: ErrorClass.CANCELLED,
    502: ErrorClass.TRANSPORT,
    503: ErrorClass.TRANSPORT,
    504: ErrorClass.DEADLINE,
}
_TGI_CODES = {"overloaded": 429}
"""Hugging Face's servers send `error_type` instead of a code once a stream has begun."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    gen_tokens: list[int] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    gen_tokens: list[int] | None = None
    finish_reason: str | None = None


_Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
"""More is no count: it would not fit into the sums."""


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None
    http_status_code: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None
    error_type: str = ""
    object: str | None = None
    message: str | None = None
    """Of an error that lies bare, as SGLang's and LMDeploy's do: `object` is "error" then. So are the next two."""
    code: int | str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def read_stream(response: HTTPResponse, request: Request, observation: Observation) -> Failure | None:
    """Note what arrives until the stream's end; how it failed or broke the protocol, if it did."""
    reader = _Reader(request, observation)
    for data in _events(response):
        received_ns = time.monotonic_ns()
        if data == b"[DONE]":
            reader.done = True
            continue
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, RecursionError) as error:
            return Failure(ErrorClass.SERVER, "PROTOCOL", f"not a chunk of a completion: {error}")
        if (failure := _error(chunk, 500)) is not None:
            return failure
        reader.take(chunk, received_ns)
    if not reader.done and not response.chunked:
        # Nothing else tells the end of such a body from a lost connection.
        return reader.unless_finished(Failure(ErrorClass.TRANSPORT, "CONNECTION_LOST", "the connection ended before [DONE]"))
    return reader.unless_finished(Failure(ErrorClass.SERVER, "PROTOCOL", "the stream ended without [DONE]"))


def refusal(status: int, body: bytes) -> Failure:
    """An answer other than 200."""
    try:
        failure = _error(_decode(body), status)
    except (msgspec.MsgspecError, RecursionError):
        failure = None
    return failure or _failure(status, body[:200].decode(errors="replace"))


class _Reader:
    """What is known of one stream so far."""

    def __init__(self, request: Request, observation: Observation) -> None:
        self.done = False
        self._request = request
        self._observation = observation
        self._usage: _Usage | None = None
        self._finish_reason: str | None = None
        self._has_ids = False
        self._counted = 0
        observation.input_tokens = len(request.token_ids)

    def take(self, chunk: _Chunk, received_ns: int) -> None:
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            delta = choice.delta
            answer = (delta.content if delta else choice.text) or ""
            ids = choice.token_ids if choice.token_ids is not None else choice.gen_tokens
            if delta and ids is None:
                ids = delta.gen_tokens
            has_text = bool(answer or (delta and (delta.reasoning_content or delta.reasoning)))
            self._has_ids = self._has_ids or ids is not None
            tokens = len(ids) if ids is not None else self._growth(chunk.usage) if has_text else 0
            if tokens:
                self._observation.arrivals.append((received_ns, tokens))
                self._counted += tokens
            if answer:
                self._observation.answer_text.append(answer)
            if ids:
                self._observation.answer_ids.extend(ids)
            self._finish_reason = choice.finish_reason or self._finish_reason

    def unless_finished(self, failure: Failure) -> Failure | None:
        """`failure` where the stream was cut; else how its answer is wrong, if it is."""
        usage, observation, request = self._usage, self._observation, self._request
        finished = self.done or (self._finish_reason is not None and usage is not None)
        if not finished:
            return failure
        if self._finish_reason == "abort":
            return Failure(ErrorClass.CANCELLED, "ABORTED", "finish_reason is abort")
        if self._finish_reason == "error":
            return Failure(ErrorClass.SERVER, "ERROR", "finish_reason is error")
        if usage is None:
            return Failure(ErrorClass.SERVER, "PROTOCOL", "the stream ended without usage")
        observation.input_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details:
            observation.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        completion_tokens = usage.completion_tokens or 0
        if not self._has_ids:
            settle(observation, completion_tokens)
        if request.token_ids and (sent := len(request.token_ids)) != usage.prompt_tokens:
            return Failure(ErrorClass.SERVER, "PROTOCOL", f"{sent} token ids sent, but usage.prompt_tokens is {usage.prompt_tokens}")
        return miscount(observation, request, completion_tokens)

    def _growth(self, usage: _Usage | None) -> int:
        """How many tokens a chunk without ids, but with text, brought. LoRAX's usage is 0 until the last."""
        if usage is None or not usage.completion_tokens:
            return 1
        return max(usage.completion_tokens - self._counted, 0)


def settle(observation: Observation, completion_tokens: int) -> None:
    """Make the sum that of the usage, where chunks could not be counted by ids.

    What is missing came with the last chunk, for all that is known. Of chunks that are pieces of tokens the last stays: TPOT needs it.
    """
    arrivals = observation.arrivals
    surplus = observation.output_tokens - completion_tokens
    while surplus > 0 and len(arrivals) > 1 and arrivals[-2][1] <= surplus:
        surplus -= arrivals.pop(-2)[1]
    if arrivals and surplus < 0:
        received_ns, tokens = arrivals[-1]
        arrivals[-1] = (received_ns, tokens - surplus)


def _events(response: HTTPResponse) -> Iterator[bytearray]:
    """The data of each server-sent event, as soon as its line is here; these APIs have one line an event."""
    rest = bytearray()
    while part := response.read1():
        rest += part
        if b"\n" not in part:
            continue
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _error(chunk: _Chunk, status: int) -> Failure | None:
    """The error that a chunk or a refusal is, in any of the servers' forms; `status` where it names no other."""
    error = chunk.error
    if isinstance(error, _Error):
        codes = (error.http_status_code, error.code)
        return _failure(next((code for code in codes if isinstance(code, int)), status), error.message)
    if error is not None:
        return _failure(_TGI_CODES.get(chunk.error_type, status), error)
    if chunk.object == "error":
        return _failure(chunk.code if isinstance(chunk.code, int) else status, chunk.message or "")
    return None


def _failure(status: int, message: str) -> Failure:
    fallback = ErrorClass.REQUEST if 400 <= status < 500 else ErrorClass.SERVER
    return Failure(_ERROR_CLASSES.get(status, fallback), f"HTTP {status}", message)
