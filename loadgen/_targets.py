"""Which target an address is of: `grpc[s]://HOST:PORT[/chat]`, `PEER+grpc://HOST:PORT` or `PEER+http://HOST:PORT/v1[/chat/completions]`."""

from __future__ import annotations

from urllib.parse import urlsplit

from inference_service.telemetry.tracing import Tracing
from loadgen._grpc_target import GrpcTarget
from loadgen._openai_target import OpenAITarget
from loadgen._peer_grpc_target import DIALECTS, PeerGrpcTarget
from loadgen._presets import PRESETS
from loadgen._target import Target, TargetError

_CHAT, _COMPLETIONS = "/chat/completions", "/completions"
_FORMS = (
    "grpc://HOST:PORT[/chat], grpcs://HOST:PORT[/chat], http://HOST:PORT/v1, "
    f"{{{','.join(DIALECTS)}}}+grpc://HOST:PORT or {{{','.join(PRESETS)}}}+http://HOST:PORT/v1[/chat/completions]"
)


def make_target(url: str, timeout_s: float, tracing: Tracing) -> Target:
    """`timeout_s` is each request's deadline. Raises TargetError for an address that is none."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  a port that is none is found where it is asked for
    except ValueError as error:
        raise TargetError(f"target {url!r}: {error}") from None
    peer, _, protocol = parts.scheme.rpartition("+")
    path = parts.path.rstrip("/")
    if parts.netloc and not parts.query and not parts.fragment:
        if protocol in ("grpc", "grpcs") and not peer and path in ("", "/chat"):
            return GrpcTarget(url, f"{protocol}://{parts.netloc}", bool(path), timeout_s, tracing)
        if protocol == "grpc" and peer in DIALECTS and not path:
            return PeerGrpcTarget(url, parts.netloc, DIALECTS[peer], timeout_s, tracing)
        # Without a name they speak as vLLM does, which others understand best.
        if (protocol == "http" and (peer or "vllm") in PRESETS) or (parts.scheme == "openai"):
            base, chat = _endpoint(path)
            if base or peer or protocol == "openai":
                return OpenAITarget(url, parts.netloc, base or "/v1", chat, PRESETS[peer or "vllm"], timeout_s, tracing)
    raise TargetError(f"target {url!r}: write {_FORMS}")


def _endpoint(path: str) -> tuple[str, bool]:
    """The API's own path, and whether it is the chat's."""
    if path.endswith(_CHAT):
        return path.removesuffix(_CHAT), True
    return path.removesuffix(_COMPLETIONS), False
