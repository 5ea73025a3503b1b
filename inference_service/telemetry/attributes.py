"""The attributes of server and client spans."""

from __future__ import annotations

from typing import Any

from inference_service.messages import Sampling
from inference_service.telemetry import names

_GRPC_CODES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""By number. Listed here, since this module must not import grpc."""


def call_attributes(method: str, code: str) -> dict[str, Any]:
    """The call and how it ended."""
    attributes: dict[str, Any] = {names.RPC_METHOD: method, names.RPC_STATUS: code}
    if code in _GRPC_CODES:
        attributes |= {names.RPC_SYSTEM: "grpc", names.RPC_GRPC_STATUS: _GRPC_CODES.index(code)}
    if code != "OK":
        attributes[names.ERROR_TYPE] = code
    return attributes


def sampling_attributes(sampling: Sampling | None, max_tokens: int) -> dict[str, Any]:
    """What was asked for."""
    attributes: dict[str, Any] = {names.REQUEST_MAX_TOKENS: max_tokens} if max_tokens else {}
    if sampling is not None:
        attributes |= {
            names.REQUEST_TEMPERATURE: sampling.temperature,
            names.REQUEST_TOP_K: sampling.top_k,
            names.REQUEST_TOP_P: sampling.top_p,
            names.REQUEST_MIN_P: sampling.min_p,
            names.REQUEST_SEED: str(sampling.seed),
        }
    return attributes


def usage_attributes(request_id: str, model: str, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Whose tokens, and how many."""
    attributes: dict[str, Any] = {
        names.INPUT_TOKENS: prompt_tokens,
        names.PROMPT_TOKENS: prompt_tokens,
        names.OUTPUT_TOKENS: completion_tokens,
        names.COMPLETION_TOKENS: completion_tokens,
    }
    if request_id:
        attributes[names.REQUEST_ID] = request_id
    if model:
        attributes |= {names.REQUEST_MODEL: model, names.RESPONSE_MODEL: model}
    return attributes


def latency_attributes(start_ns: int, first_ns: int, last_ns: int, end_ns: int, tokens: int) -> dict[str, Any]:
    """Durations in seconds, from monotonic nanoseconds of which 0 means "never got there"."""
    attributes: dict[str, Any] = {names.TIME_E2E: (end_ns - start_ns) / 1e9}
    if first_ns:
        attributes[names.TIME_TO_FIRST_TOKEN] = attributes[names.TIME_TO_FIRST_CHUNK] = (first_ns - start_ns) / 1e9
        if tokens > 1 and last_ns > first_ns:
            attributes[names.TIME_PER_OUTPUT_TOKEN] = (last_ns - first_ns) / (tokens - 1) / 1e9
    return attributes
