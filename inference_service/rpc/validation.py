"""Requests checked, completed with the model's defaults and tokenized: what comes out can be computed as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import grpc
from google.protobuf.json_format import MessageToDict

from inference.v1 import generate_pb2
from inference_service.messages import Ready, Submit
from inference_service.rpc.caller import of_caller
from inference_service.rpc.errors import RpcError, invalid
from inference_service.rpc.sampling_params import SamplingReader
from inference_service.rpc.structured_output import read_grammar
from inference_service.text.chat_template import ChatTemplateError
from inference_service.text.tokenizer import Tokenizer

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20
MAX_REQUEST_ID = 128
MAX_CHOICES = 16
MAX_CACHE_SALT = 128
MAX_CHAT_MESSAGES = 4096
MAX_TEMPLATE_KWARGS_BYTES = 64 << 10


def count_choices(request: generate_pb2.GenerateRequest, limit: int) -> int:
    """How many answers a request asks for, of which at most `limit` may be in flight. Raises RpcError for too many, or none."""
    count = request.sampling.n if request.sampling.HasField("n") else 1
    if not 1 <= count <= min(MAX_CHOICES, limit):
        raise invalid("sampling.n", f"must be in [1, {min(MAX_CHOICES, limit)}], not {count}")
    return count


def is_request_id(name: str) -> bool:
    """Whether a client may call its request so."""
    return 0 < len(name) <= MAX_REQUEST_ID and name.isascii() and name.isprintable()


class RequestReader:
    """Reads requests for one model. Every fault is an RpcError that names the field."""

    def __init__(self, model: str, tokenizer: Tokenizer, ready: Ready, max_prompt_tokens: int = 0) -> None:
        """`max_prompt_tokens` is the configuration's; 0: as many as context and cache hold."""
        self._model = model
        self._max_prompt_tokens = max_prompt_tokens
        self._tokenizer = tokenizer
        self._sampling = SamplingReader(tokenizer, ready.vocab_size)
        self._vocab_size = ready.vocab_size
        self._max_context = ready.max_context
        self._cache_tokens = ready.pages * ready.page_size
        # A tokenizer may know more tokens than the model has logits for: none of those can ever be drawn.
        self._eos_ids = [token_id for token_id in tokenizer.eos_token_ids if token_id < ready.vocab_size]

    def read(self, request: generate_pb2.GenerateRequest, key: int, arrival_ns: int, deadline_ns: int) -> Submit:
        """The request as the engine takes it."""
        self._check_names(request)
        grammar = None
        if request.HasField("structured_output"):
            grammar = read_grammar(request.structured_output, self._eos_ids, request.stopping.ignore_eos)
        sampling = self._sampling.read(request.sampling)
        min_tokens = request.stopping.min_tokens
        stop_ids = self._stop_ids(request.stopping)
        self._check_bans(sampling.bad_words, stop_ids if min_tokens else [])
        logprobs, prompt_logprobs = (self._logprobs(request.output, field) for field in ("logprobs", "prompt_logprobs"))
        token_ids = self.prompt_ids(request)
        if 0 < self._max_prompt_tokens < len(token_ids):
            raise invalid(request.WhichOneof("prompt") or "prompt", f"{len(token_ids)} tokens, of at most {self._max_prompt_tokens}")
        max_tokens = self._max_tokens(request, len(token_ids))
        if min_tokens > max_tokens:
            raise invalid("stopping.min_tokens", f"{min_tokens} is more than the {max_tokens} tokens that the answer may have")
        return Submit(
            key,
            token_ids,
            sampling,
            max_tokens,
            min_tokens,
            stop_ids,
            logprobs,
            arrival_ns,
            deadline_ns,
            prompt_logprobs,
            priority=request.priority,
            cache_salt=_cache_salt(request.cache_salt),
            grammar=grammar,
        )

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
        if len(chat.messages) > MAX_CHAT_MESSAGES:
            raise invalid("chat.messages", f"at most {MAX_CHAT_MESSAGES} messages, not {len(chat.messages)}")
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
        if chat.template_kwargs.ByteSize() > MAX_TEMPLATE_KWARGS_BYTES:
            raise invalid("chat.template_kwargs", f"at most {MAX_TEMPLATE_KWARGS_BYTES} bytes")
        try:
            kwargs: dict[str, Any] = MessageToDict(chat.template_kwargs)
        except ValueError as error:  # NaN and infinities, which JSON has not
            raise invalid("chat.template_kwargs", str(error)) from None
        if taken := kwargs.keys() & {"messages", "add_generation_prompt", "continue_final_message"}:
            raise invalid("chat.template_kwargs", f"{', '.join(sorted(taken))}: the request has a field for it")
        return kwargs

    def _check_names(self, request: generate_pb2.GenerateRequest) -> None:
        if request.request_id and not is_request_id(request.request_id):
            raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters")
        if request.model and request.model != self._model:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", f"model: {request.model!r} is not served, {self._model!r} is", field="model"
            )
        if request.adapter:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER", f"adapter: no adapter {request.adapter!r} is served", field="adapter"
            )

    def _stop_ids(self, stopping: generate_pb2.StopConditions) -> list[int]:
        if len(stopping.stop) > MAX_STOP_STRINGS:
            raise invalid("stopping.stop", f"at most {MAX_STOP_STRINGS} strings, not {len(stopping.stop)}")
        if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stopping.stop):
            raise invalid("stopping.stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters")
        if len(stopping.stop_token_ids) > MAX_STOP_IDS:
            raise invalid("stopping.stop_token_ids", f"at most {MAX_STOP_IDS} ids, not {len(stopping.stop_token_ids)}")
        self._check_ids("stopping.stop_token_ids", stopping.stop_token_ids)
        return sorted({*stopping.stop_token_ids, *([] if stopping.ignore_eos else self._eos_ids)})

    def _check_bans(self, bad_words: list[list[int]], early_stops: list[int]) -> None:
        """Something must be left to draw. What words of several tokens ban depends on the answer: see execution/edits.py."""
        if len(early_stops) >= self._vocab_size:
            raise invalid("stopping.min_tokens", "every token ends the answer, so none can be drawn before that")
        if len({*early_stops, *(word[0] for word in bad_words if len(word) == 1)}) >= self._vocab_size:
            raise invalid("sampling.bad_words", "no token is left to draw")

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self._vocab_size:
            raise invalid(field, f"id {max(ids)} is outside the vocabulary of {self._vocab_size}")

    def _logprobs(self, output: generate_pb2.OutputOptions, field: Literal["logprobs", "prompt_logprobs"]) -> int:
        if not output.HasField(field):
            return -1
        alternatives: int = getattr(output, field)
        if alternatives > min(MAX_LOGPROBS, self._vocab_size):
            raise invalid(f"output.{field}", f"at most {MAX_LOGPROBS} alternatives, not {alternatives}")
        return alternatives

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


def _cache_salt(given: str) -> str:
    """With the caller's name in it: clients of different tokens share no cached prefix, not even by guessing each other's salt."""
    if len(given) > MAX_CACHE_SALT:
        raise invalid("cache_salt", f"at most {MAX_CACHE_SALT} characters, not {len(given)}")
    return of_caller(given)
