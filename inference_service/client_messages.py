"""What the client sends and receives: requests from prompts and keyword arguments, whole answers, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from inference.v1 import generate_pb2

Conversation = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Conversation


class InferenceError(RuntimeError):
    """A call failed. The fields beyond code and message come from the error's google.rpc details, where the server gave some."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        reason: str = "",
        field_violations: Sequence[tuple[str, str]] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        """ErrorInfo's: one word for machines."""
        self.field_violations = list(field_violations)
        """BadRequest's: (field, what is wrong with it)."""
        self.retry_delay_s = retry_delay_s
        """RetryInfo's: when to try again; None: the server did not say that trying again helps."""


@dataclass
class Completion:
    """A whole answer."""

    request_id: str = ""
    seed: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[generate_pb2.TokenLogprobs] = field(default_factory=list)
    """One entry a token id, when asked for."""
    prompt_logprobs: list[generate_pb2.TokenLogprobs] = field(default_factory=list)
    """One entry a token of the prompt, when asked for; the first has no content."""
    token_times_unix_ns: list[int] = field(default_factory=list)
    """One entry a token id: when the engine had it."""
    finish_reason: str = ""
    """"stop", "length" or "aborted"."""
    matched_stop: str | int | None = None
    """The stop string or token id that ended the answer."""
    usage: generate_pb2.Usage = field(default_factory=generate_pb2.Usage)
    timings: generate_pb2.Timings = field(default_factory=generate_pb2.Timings)

    def add(self, event: generate_pb2.GenerateResponse) -> None:
        """Take in the stream's next message."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.request_id, self.seed = event.accepted.request_id, event.accepted.seed
            self.prompt_logprobs += event.accepted.prompt_logprobs
        elif kind == "delta":
            self.text += event.delta.text
            self.token_ids += event.delta.token_ids
            self.logprobs += event.delta.logprobs
            self.token_times_unix_ns += event.delta.token_times_unix_ns
        elif kind == "finished":
            reason = generate_pb2.FinishReason.Name(event.finished.reason)
            self.finish_reason = reason.removeprefix("FINISH_REASON_").lower()
            matched = event.finished.WhichOneof("matched_stop")
            self.matched_stop = getattr(event.finished, matched) if matched else None
            self.usage, self.timings = event.finished.usage, event.finished.timings


class Completions:
    """The answers of one call, as its stream brings them."""

    def __init__(self) -> None:
        self._accepted = generate_pb2.GenerateResponse()
        self._choices: dict[int, Completion] = {}

    def add(self, event: generate_pb2.GenerateResponse) -> Completion | None:
        """Take in the stream's next message, and give the answer that it belongs to: none, for the message that belongs to all."""
        if event.HasField("accepted"):
            self._accepted = event
            return None
        index = event.delta.index if event.HasField("delta") else event.finished.index
        if index not in self._choices:
            self._choices[index] = Completion()
            self._choices[index].add(self._accepted)
        self._choices[index].add(event)
        return self._choices[index]

    def checked(self, n: int) -> list[Completion]:
        """All `n` of them, if they are whole."""
        if len(self._choices) < n or not all(choice.finish_reason for choice in self._choices.values()):
            raise InferenceError(grpc.StatusCode.INTERNAL, "the stream ended before the answer did")
        return [choice for _, choice in sorted(self._choices.items())]


def generate_request(prompt: Prompt, **fields: Any) -> generate_pb2.GenerateRequest:
    """The message for a prompt and fields by name. Raises TypeError or ValueError, which name the field."""
    request = generate_pb2.GenerateRequest()
    _set_prompt(request, prompt)
    _set_fields(request, fields, _GENERATE_PARTS)
    return request


def tokenize_request(prompt: str | Conversation, **fields: Any) -> generate_pb2.TokenizeRequest:
    """The message for a prompt and fields by name; see `generate_request`."""
    request = generate_pb2.TokenizeRequest()
    _set_prompt(request, prompt)
    _set_fields(request, fields, ("chat",))
    return request


_GENERATE_PARTS = ("sampling", "stopping", "output", "structured_output", "chat")
_NOT_FIELDS = {"text", "token_ids", "messages", *_GENERATE_PARTS}
"""What the prompt sets, and messages whose own fields are the keyword arguments."""


def _set_prompt(request: Any, prompt: Any) -> None:
    if isinstance(prompt, str):
        _assign(request, {"text": prompt})
    elif prompt and isinstance(prompt[0], Mapping):
        for message in prompt:
            _assign(request.chat.messages.add(), message)
    elif isinstance(request, generate_pb2.GenerateRequest):
        request.token_ids.SetInParent()
        _assign(request.token_ids, {"ids": prompt})
    else:
        raise TypeError("prompt: must be text or a conversation")


def _set_fields(request: Any, fields: Mapping[str, Any], parts: Sequence[str]) -> None:
    for name, value in fields.items():
        owners = [part for part in ("", *parts) if name in _field_names(request.DESCRIPTOR, part) - _NOT_FIELDS]
        if not owners:
            raise TypeError(f"{name}: no such field")
        if value is None:
            continue
        if owners == ["chat"] and request.WhichOneof("prompt") != "chat":
            raise TypeError(f"{name}: only for a conversation")
        _assign(getattr(request, owners[0]) if owners[0] else request, {name: value})


def _field_names(descriptor: Descriptor, part: str) -> set[str]:
    message = descriptor.fields_by_name[part].message_type if part else descriptor
    assert message is not None
    return set(message.fields_by_name)


def _assign(message: Message, values: Mapping[str, Any]) -> None:
    """Set fields; errors name them."""
    for name, value in values.items():
        # One string where several may stand (`stop="x"`) is one of them, not its letters.
        if isinstance(value, str) and name in message.DESCRIPTOR.fields_by_name and message.DESCRIPTOR.fields_by_name[name].is_repeated:
            value = [value]
        try:
            message.MergeFrom(type(message)(**{name: value}))
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        except ValueError as error:  # lone surrogates too, whose own class takes other arguments
            raise ValueError(f"{name}: {error}") from None


def inference_error(error: Any) -> InferenceError:
    """The error of a failed call, with its google.rpc details."""
    code, message = error.code(), error.details() or ""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details of another error than this one
        status = None
    info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    for detail in status.details if status else ():
        for known in (info, request, retry):
            detail.Unpack(known)
    violations = [(violation.field, violation.description) for violation in request.field_violations]
    delay = retry.retry_delay.ToTimedelta().total_seconds() if retry.HasField("retry_delay") else None
    return InferenceError(code, message, info.reason, violations, delay)
