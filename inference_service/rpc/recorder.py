"""Tells spans, metrics and logs of each Generate call: once, at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from inference.v1 import generate_pb2 as pb
from inference_service.rpc.choice import Choice
from inference_service.rpc.errors import RpcError
from inference_service.rpc.generation import Generation
from inference_service.telemetry.content import content_attributes
from inference_service.telemetry.logs import REQUEST, RequestIds
from inference_service.telemetry.metrics import RequestMetrics
from inference_service.telemetry.tracing import Metadata, RequestTrace, Tracing
from inference_service.text.tokenizer import Tokenizer

GENERATE = "/inference.v1.InferenceService/Generate"

_CUT_SHORT = {"CANCELLED": "cancelled", "DEADLINE_EXCEEDED": "deadline"}
"""The finish reason of a choice that had not ended when its call did; after any other status it is "error"."""


class Recorder:
    """The telemetry of one model's calls. What was said is left out unless `record_prompts`."""

    def __init__(self, tracing: Tracing, metrics: RequestMetrics, model: str, tokenizer: Tokenizer, record_prompts: bool) -> None:
        self._tracing = tracing
        self._metrics = metrics
        self._model = model
        self._tokenizer = tokenizer
        self._record_prompts = record_prompts

    def begin(self, metadata: Metadata, request_id: str, arrival_ns: int) -> RequestTrace:
        """A call has come. What is logged in its task from now on has its ids."""
        trace = self._tracing.request(metadata, arrival_ns)
        REQUEST.set(RequestIds(request_id, trace.trace_id, trace.span_id))
        return trace

    def refused(self, method: str, metadata: Metadata, error: RpcError) -> None:
        """A call was refused before its request was read. Others than of Generate are not told of."""
        if method == GENERATE:
            now_ns = time.monotonic_ns()
            self._metrics.ended(error.code.name, arrival_ns=now_ns, end_ns=now_ns, refusal=error.reason)
            message = error.reason  # the rest of it may quote what was sent
            self._tracing.request(metadata, now_ns).end(error.code.name, end_ns=now_ns, message=message, model=self._model)

    def admitted(self, generation: Generation) -> None:
        """The call is being answered."""
        if self._record_prompts:
            for choice in generation.choices:
                choice.said = []

    def end(
        self,
        trace: RequestTrace,
        request: pb.GenerateRequest,
        request_id: str,
        code: str,
        *,
        message: str,
        error: RpcError | None,
        generation: Generation | None,
    ) -> None:
        """The call has ended with a status; without a `generation` it was not admitted."""
        common: dict[str, Any] = {"end_ns": time.monotonic_ns(), "prompt_tokens": 0, "cached_tokens": 0}
        if error is not None and error.field and not self._record_prompts:
            # The message may quote what the field has.
            message = f"{error.reason}: {error.field}"
        about: dict[str, Any] = {
            "message": message,
            "request_id": request_id,
            "model": self._model,
            "content": self._content(request, generation, code),
        }
        if generation is None:
            self._metrics.ended(code, arrival_ns=trace.arrival_ns, refusal=error.reason if error else "", **common)
            trace.end(code, **common, **about)
            return
        choices, submit = generation.choices, generation.choices[0].submit
        tokens = [choice.completion_tokens for choice in choices]
        common |= {
            "scheduled_ns": choices[0].scheduled_ns,
            "first_token_ns": min((choice.first_delta_ns for choice in choices if choice.first_delta_ns), default=0),
            "last_token_ns": max(choice.last_delta_ns for choice in choices),
            "prompt_tokens": len(submit.token_ids),
            "cached_tokens": generation.cached_tokens,
            "completion_tokens": sum(tokens),
            "longest_answer": max(tokens),
        }
        self._metrics.ended(code, arrival_ns=trace.arrival_ns, **common)
        trace.end(
            code,
            **common,
            **about,
            admitted=True,
            sampling=submit.sampling,
            max_tokens=submit.max_tokens,
            choices=len(choices),
            finish_reasons=[finish_reason(choice, code) for choice in choices],
            preemptions=sum(choice.preemptions for choice in choices),
        )

    def _content(self, request: pb.GenerateRequest, generation: Generation | None, code: str) -> Mapping[str, str]:
        if not self._record_prompts:
            return {}
        answers = [("".join(choice.said or ()), finish_reason(choice, code)) for choice in generation.choices] if generation else []
        return content_attributes(self._asked(request), answers)

    def _asked(self, request: pb.GenerateRequest) -> list[tuple[str, str]]:
        if request.HasField("chat"):
            return [(message.role, message.content) for message in request.chat.messages]
        if request.HasField("text"):
            return [("user", request.text)]
        known = [token_id for token_id in request.token_ids.ids if token_id < self._tokenizer.vocab_size]
        return [("user", self._tokenizer.decode(known, skip_special_tokens=False))]


def finish_reason(choice: Choice, code: str) -> str:
    """Why a choice ended, at its own end or at that of its call."""
    return choice.finish.reason if choice.finish else _CUT_SHORT.get(code, "error")
