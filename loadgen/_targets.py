"""Which target an address is of, by its scheme."""

from __future__ import annotations

from urllib.parse import urlsplit

from inference_service.telemetry.tracing import Tracing
from loadgen._grpc_target import GrpcTarget
from loadgen._openai_target import OpenAITarget
from loadgen._target import Target, TargetError


def make_target(url: str, timeout_s: float, tracing: Tracing) -> Target:
    """`timeout_s` is each request's deadline. Raises TargetError for an address that is none."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    match parts.scheme, path:
        case ("grpc", "") if parts.netloc:
            return GrpcTarget(url, parts.netloc, timeout_s, tracing)
        case ("openai", "" | "/v1") | ("http", "/v1") if parts.netloc:
            return OpenAITarget(url, parts.netloc, timeout_s, tracing)
    raise TargetError(f"target {url!r}: write grpc://HOST:PORT, openai://HOST:PORT or http://HOST:PORT/v1")
