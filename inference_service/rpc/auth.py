"""Bearer tokens: who may call, and who it is that calls.

A token is known here by its SHA-256 digest alone, so that nothing which prints or dumps what this module holds can give it away. That no
slow hash is needed rests on tokens being long and random, such as those of `openssl rand -hex 32`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import grpc
import msgspec
import yaml
from msgspec import Meta

from inference_service.config import ConfigError, Limits
from inference_service.rpc.caller import CALLER, Caller, ClientLimits
from inference_service.rpc.errors import OnRefused, RpcError
from inference_service.sections import CountOrAuto, Section, readable

log = logging.getLogger(__name__)

HEALTH = "/grpc.health.v1.Health/"
"""Whoever asks for it has no token: kubelets and balancers."""
MIN_TOKEN = 16
"""Characters. What is shorter can be guessed."""
MISSING_TOKEN = RpcError(grpc.StatusCode.UNAUTHENTICATED, "MISSING_TOKEN", "a bearer token is required in the metadata `authorization`")
UNKNOWN_TOKEN = RpcError(grpc.StatusCode.UNAUTHENTICATED, "UNKNOWN_TOKEN", "the bearer token is not known")

Call: TypeAlias = grpc.HandlerCallDetails
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class Client(Section, frozen=True):
    """An entry of the tokens' file."""

    name: Annotated[str, Meta(pattern=r"^[!-~]{1,64}$")]
    """1 to 64 printable ASCII characters without spaces; stands in logs and spans, and keeps the client's prefix cache its own."""
    token: str = ""
    token_sha256: Annotated[str, Meta(pattern=r"^([0-9a-fA-F]{64})?$")] = ""
    """The token's SHA-256 digest as hexadecimal digits, instead of the token."""
    streams: CountOrAuto | None = None
    requests_per_s: Annotated[float, Meta(ge=0)] | None = None
    tokens_per_min: CountOrAuto | None = None
    """Of its own; where one is not given, that of `limits` holds. 0 is no limit."""

    def __post_init__(self) -> None:
        if bool(self.token) == bool(self.token_sha256):
            raise ValueError(f"client {self.name!r} needs either token or token_sha256")
        if self.token and not re.fullmatch(rf"[!-~]{{{MIN_TOKEN},}}", self.token):
            raise ValueError(f"client {self.name!r}: token must have at least {MIN_TOKEN} printable ASCII characters, and no spaces")

    @property
    def digest(self) -> bytes:
        return bytes.fromhex(self.token_sha256) if self.token_sha256 else digest(self.token)

    def caller(self, limits: Limits) -> Caller:
        """With the limits of its own; `limits` has the others."""
        return Caller(
            self.name,
            ClientLimits(
                limits.client_streams if self.streams is None else self.streams,
                limits.client_requests_per_s if self.requests_per_s is None else self.requests_per_s,
                limits.client_tokens_per_min if self.tokens_per_min is None else self.tokens_per_min,
            ),
        )


def digest(token: str) -> bytes:
    """SHA-256 of the token's bytes."""
    return hashlib.sha256(token.encode()).digest()


class Tokens:
    """The clients that may call, by the digests of their tokens."""

    def __init__(self, clients: Iterable[Client], limits: Limits) -> None:
        self._callers = [(client.digest, client.caller(limits)) for client in clients]

    def find(self, token: str) -> Caller | None:
        """Whose token it is. Takes as long for the first as for the last, and for one that is nearly right as for any other."""
        offered, found = digest(token), None
        for known, caller in self._callers:
            if hmac.compare_digest(known, offered):
                found = caller
        return found


def load_tokens(path: Path, limits: Limits) -> Tokens:
    """Read `security.tokens_file`. Raises ConfigError, which names the key and the entry at fault, and quotes nothing of the file."""
    where = f"security.tokens_file: {path}"
    try:
        clients = msgspec.convert(yaml.safe_load(path.read_text()), list[Client])
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {readable(error)}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(f"{where}: {f'line {mark.line + 1} ' if mark else ''}is not YAML") from None
    if not clients:
        raise ConfigError(f"{where}: names no client, so that nobody could call")
    places: dict[str | bytes, int] = {}
    for place, client in enumerate(clients):
        for what, value in (("name", client.name), ("token", client.digest)):
            if (earlier := places.setdefault(value, place)) != place:
                raise ConfigError(f"{where}: [{place}].{what}: is that of [{earlier}] too")
    if path.stat().st_mode & stat.S_IROTH:
        log.warning("%s can be read by every user of this machine: chmod o-r", where)
    return Tokens(clients, limits)


class Authentication(grpc.aio.ServerInterceptor):
    """Refuses calls without a known token before any of their message is read, and tells the others' handlers who calls (CALLER).

    The interceptor runs in the task of the call that it lets through, and so does the handler: each has the context to itself.
    """

    def __init__(self, tokens: Tokens, on_refused: OnRefused) -> None:
        self._tokens = tokens
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Callable[[Call], Awaitable[Handler]], handler_call_details: Call) -> Handler:
        if handler_call_details.method.startswith(HEALTH):
            return await continuation(handler_call_details)
        given = [value for key, value in handler_call_details.invocation_metadata if key == "authorization"]
        if not given:
            return self._refusal(MISSING_TOKEN, handler_call_details)
        scheme, _, token = str(given[0]).partition(" ")
        caller = self._tokens.find(token) if len(given) == 1 and scheme.lower() == "bearer" else None
        if caller is None:
            return self._refusal(UNKNOWN_TOKEN, handler_call_details)
        CALLER.set(caller)
        return await continuation(handler_call_details)

    def _refusal(self, error: RpcError, call: Call) -> Handler:
        self._on_refused(call.method, call.invocation_metadata, error)
        return refusal(error)


def refusal(error: RpcError) -> Handler:
    """A handler that ends any call at once: as one of a stream of requests, it does not wait for the first of them."""

    async def abort(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await error.abort(context)

    return grpc.stream_stream_rpc_method_handler(abort)
