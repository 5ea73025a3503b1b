"""Requests checked, completed with the model's defaults and tokenized: what comes out can be computed as it is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from inference.v1 import generate_pb2
from inference_service.messages import Ready, Sampling, Submit
from inference_service.rpc.errors import RpcError, invalid, unimplemented
from inference_service.text.chat_template import ChatTemplateError
from inference_service.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20
MAX_REQUEST_ID = 128

_NOT_YET: dict[str, Callable[[generate_pb2.GenerateRequest], bool]] = {
    "sampling.n": lambda r: r.sampling.HasField("n") and r.sampling.n > 1,
    "sampling.repetition_penalty": lambda r: r.sampling.HasField("repetition_penalty") and r.sampling.repetition_penalty != 1,
    "sampling.frequency_penalty": lambda r: r.sampling.frequency_penalty != 0,
    "sampling.presence_penalty": lambda r: r.sampling.presence_penalty != 0,
    "sampling.logit_bias": lambda r: bool(r.sampling.logit_bias),
    "sampling.bad_words": lambda r: bool(r.sampling.bad_words),
    "output.prompt_logprobs": lambda r: r.output.HasField("prompt_logprobs"),
    "structured_output": lambda r: r.HasField("structured_output"),
    "priority": lambda r: r.priority != 0,
    "cache_salt": lambda r: bool(r.cache_salt),
}
"""Fields that the API has and this version does not serve: whether a request uses them."""


class RequestReader:
    """Reads requests for one model. Every fault is an RpcError that names the field."""

    def __init__(self, model: str, tokenizer: Tokenizer, ready: Ready) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._defaults = tokenizer.sampling_defaults
        self._vocab_size = ready.vocab_size
        self._max_context = ready.max_context
        self._cache_tokens = ready.pages * ready.page_size
        # A tokenizer may know more tokens than the model has logits for: none of those can ever be drawn.
        self._eos_ids = [token_id for token_id in tokenizer.eos_token_ids if token_id < ready.vocab_size]

    def read(self, request: generate_pb2.GenerateRequest, key: int, arrival_ns: int, deadline_ns: int) -> Submit:
        """The request as the engine takes it."""
        self._check_names(request)
        for field, uses in _NOT_YET.items():
            if uses(request):
                raise unimplemented(field)
        sampling = self._sampling(request.sampling)
        min_tokens = request.stopping.min_tokens
        stop_ids = self._stop_ids(request.stopping)
        logprobs = self._logprobs(request.output)
        token_ids = self.prompt_ids(request)
        max_tokens = self._max_tokens(request, len(token_ids))
        if min_tokens > max_tokens:
            raise invalid("stopping.min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that the answer may have")
        return Submit(key, token_ids, sampling, max_tokens, min_tokens, stop_ids, logprobs, arrival_ns, deadline_ns)

    def prompt_ids(
        self, request: generate_pb2.GenerateRequest | generate_pb2.TokenizeRequest, add_special_tokens: bool = True
    ) -> list[int]:
        """The prompt's token ids, at least one."""
        kind = request.WhichOneof("prompt")
        match kind:
            case "text":
                ids = self._tokenizer.encode(request.text, add_special_tokens=add_special_tokens)
            case "chat":
                ids = self._chat_ids(request.chat)
            case "token_ids":
                assert isinstance(request, generate_pb2.GenerateRequest)
                ids = list(request.token_ids.ids)
            case _:
                raise invalid("prompt", "one of text, chat and token_ids is required")
        if not ids:
            raise invalid(kind, "the prompt has no tokens")
        self._check_ids(kind, ids)
        return ids

    def _chat_ids(self, chat: generate_pb2.ChatPrompt) -> list[int]:
        if not self._tokenizer.has_chat_template:
            raise invalid("chat", "the model has no chat template; send text or token_ids")
        if not chat.messages:
            raise invalid("chat.messages", "at least one is required")
        for place, message in enumerate(chat.messages):
            if not message.role:
                raise invalid(f"chat.messages[{place}].role", "is required")
        proceed = chat.continue_final_message
        if proceed and chat.add_generation_prompt:
            raise invalid("chat.continue_final_message", "excludes add_generation_prompt")
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        kwargs = self._template_kwargs(chat)
        start = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not proceed
        try:
            return self._tokenizer.encode_chat(messages, add_generation_prompt=start, continue_final_message=proceed, **kwargs)
        except ChatTemplateError as error:
            raise invalid("chat", str(error)) from None

    def _template_kwargs(self, chat: generate_pb2.ChatPrompt) -> dict[str, Any]:
        try:
            kwargs: dict[str, Any] = MessageToDict(chat.template_kwargs)
        except ValueError as error:  # NaN and infinities, which JSON has not
            raise invalid("chat.template_kwargs", str(error)) from None
        if taken := kwargs.keys() & {"messages", "add_generation_prompt", "continue_final_message"}:
            raise invalid("chat.template_kwargs", f"{', '.join(sorted(taken))}: the request has a field for it")
        return kwargs

    def _check_names(self, request: generate_pb2.GenerateRequest) -> None:
        name = request.request_id
        if len(name) > MAX_REQUEST_ID or not (name.isascii() and (name.isprintable() or not name)):
            raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters")
        if request.model and request.model != self._model:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", f"model: {request.model!r} is not served, {self._model!r} is", field="model"
            )
        if request.adapter:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER", f"adapter: no adapter {request.adapter!r} is served", field="adapter"
            )

    def _sampling(self, given: generate_pb2.SamplingParams) -> Sampling:
        defaults = self._defaults
        temperature = given.temperature if given.HasField("temperature") else defaults.temperature
        top_k = given.top_k if given.HasField("top_k") else defaults.top_k
        top_p = given.top_p if given.HasField("top_p") else defaults.top_p
        min_p = given.min_p if given.HasField("min_p") else defaults.min_p
        if not (0 <= temperature < math.inf):
            raise invalid("sampling.temperature", f"must be at least 0 and finite, not {temperature:g}")
        if not (0 < top_p <= 1):
            raise invalid("sampling.top_p", f"must be in (0, 1], not {top_p:g}")
        if not (0 <= min_p <= 1):
            raise invalid("sampling.min_p", f"must be in [0, 1], not {min_p:g}")
        if given.HasField("n") and given.n == 0:
            raise invalid("sampling.n", "must be at least 1")
        seed = given.seed if given.HasField("seed") else random.getrandbits(64)
        return Sampling(temperature, top_k, top_p, min_p, seed)

    def _stop_ids(self, stopping: generate_pb2.StopConditions) -> list[int]:
        if len(stopping.stop) > MAX_STOP_STRINGS:
            raise invalid("stopping.stop", f"at most {MAX_STOP_STRINGS} strings, not {len(stopping.stop)}")
        if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stopping.stop):
            raise invalid("stopping.stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters")
        if len(stopping.stop_token_ids) > MAX_STOP_IDS:
            raise invalid("stopping.stop_token_ids", f"at most {MAX_STOP_IDS} ids, not {len(stopping.stop_token_ids)}")
        self._check_ids("stopping.stop_token_ids", stopping.stop_token_ids)
        ids = sorted({*stopping.stop_token_ids, *([] if stopping.ignore_eos else self._eos_ids)})
        if stopping.min_tokens and len(ids) >= self._vocab_size:
            raise invalid("stopping.min_tokens", "every token ends the answer, so none can be drawn before that")
        return ids

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self._vocab_size:
            raise invalid(field, f"id {max(ids)} is outside the vocabulary of {self._vocab_size}")

    def _logprobs(self, output: generate_pb2.OutputOptions) -> int:
        if not output.HasField("logprobs"):
            return -1
        if output.logprobs > min(MAX_LOGPROBS, self._vocab_size):
            raise invalid("output.logprobs", f"at most {MAX_LOGPROBS} alternatives, not {output.logprobs}")
        return output.logprobs

    def _max_tokens(self, request: generate_pb2.GenerateRequest, prompt_tokens: int) -> int:
        """The answer's limit: what was asked for, else what context and KV cache have room for."""
        context_room, cache_room = self._max_context - prompt_tokens, self._cache_tokens - prompt_tokens
        if context_room < 1:
            field = request.WhichOneof("prompt") or "prompt"
            raise invalid(field, f"{prompt_tokens} tokens leave no room for an answer in the model's context of {self._max_context}")
        asked = request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None
        if asked == 0:
            raise invalid("stopping.max_tokens", "must be at least 1")
        if asked is not None and asked > context_room:
            raise invalid(
                "stopping.max_tokens",
                f"{asked} after a prompt of {prompt_tokens} tokens exceeds the model's context of {self._max_context}",
            )
        if (asked or 1) > cache_room:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "KV_CACHE_TOO_SMALL",
                f"a prompt of {prompt_tokens} tokens and an answer of {asked or 1} exceed the KV cache of {self._cache_tokens} tokens",
            )
        return asked or min(context_room, cache_room)
