"""How much each client may ask for: calls at once, requests a second, tokens a minute.

A client is whom its token names (caller.py), else what it says it is in the metadata key `limits.client_key`; calls that say nothing are
together one client. Only a token proves who calls: the key divides clients that mean well. Every front-end process keeps its own counts,
so that with N workers a client whose calls are spread among them has up to N times its limits.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import grpc

from inference_service.config import Limits
from inference_service.rpc.caller import CALLER, ClientLimits
from inference_service.rpc.errors import RpcError, invalid

MAX_IDLE = 10_000
"""Clients without a call that are remembered; those that were idle for longest are forgotten first, and then have their full limits."""
MAX_NAME = 128
STREAM_RETRY_S = 1.0
"""When one of a client's streams ends, that client knows best."""

Clock = Callable[[], float]


class Bucket:
    """Holds up to `capacity`, and gets `rate` a second. More may be taken than is there: then it is in debt until that has come in."""

    def __init__(self, rate: float, capacity: float) -> None:
        self._rate = rate
        self._capacity = capacity
        self._full_s = 0.0
        """When it will be full, if nothing is taken."""

    def wait_s(self, now_s: float, amount: float) -> float:
        """Seconds until `amount` is there; 0: it is, or will be within a microsecond, which is how exact this is."""
        wait_s = self._full_s - now_s - (self._capacity - amount) / self._rate
        return wait_s if wait_s > 1e-6 else 0.0

    def take(self, now_s: float, amount: float) -> None:
        self._full_s = max(self._full_s, now_s) + amount / self._rate


class Client:
    """What a client has left."""

    def __init__(self, limits: ClientLimits, clock: Clock) -> None:
        self.streams = 0
        """Calls of it, the one that is being admitted among them."""
        self._limits = limits
        self._clock = clock
        self._requests = Bucket(limits.requests_per_s, max(1.0, limits.requests_per_s)) if limits.requests_per_s else None
        self._tokens = Bucket(limits.tokens_per_min / 60, limits.tokens_per_min) if limits.tokens_per_min else None

    @property
    def has_token_limit(self) -> bool:
        return self._tokens is not None

    def check(self) -> None:
        """Raises RpcError (RESOURCE_EXHAUSTED) if the client may not make one more request now."""
        limits, now_s = self._limits, self._clock()
        if limits.streams and self.streams > limits.streams:
            raise _over("streams", limits.streams, f"{limits.streams} calls at once", STREAM_RETRY_S)
        if self._requests and (wait_s := self._requests.wait_s(now_s, 1)):
            raise _over("requests_per_s", limits.requests_per_s, f"{limits.requests_per_s:g} requests a second", wait_s)
        if self._tokens and (wait_s := self._tokens.wait_s(now_s, 0)):
            raise _over("tokens_per_min", limits.tokens_per_min, f"{limits.tokens_per_min} tokens a minute", wait_s)

    def pay_requests(self, count: int) -> None:
        """Charge requests; of several choices each is one. They may be more than is left, as tokens may."""
        if self._requests:
            self._requests.take(self._clock(), count)

    def pay_tokens(self, count: int) -> None:
        """Charge tokens of a prompt, or of an answer. They may be more than is left: then the next request is refused for a while."""
        if self._tokens:
            self._tokens.take(self._clock(), count)


class Clients:
    """All clients with limits that have a call, and the latest of those that had one."""

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._key = limits.client_key.lower()
        self._defaults = ClientLimits(limits.client_streams, limits.client_requests_per_s, limits.client_tokens_per_min)
        self._clock = clock
        self._active: dict[tuple[bool, str], Client] = {}
        self._idle: OrderedDict[tuple[bool, str], Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._active) + len(self._idle)

    @contextmanager
    def call(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Iterator[Client | None]:
        """A call's client, for as long as the call lasts; None: one without limits. Raises RpcError for a name that is none."""
        name, limits = self._identify(metadata or ())
        if limits == ClientLimits():
            yield None
            return
        client = self._active.get(name) or self._idle.pop(name, None) or Client(limits, self._clock)
        self._active[name] = client
        client.streams += 1
        try:
            yield client
        finally:
            client.streams -= 1
            if not client.streams:
                self._idle[name] = self._active.pop(name)
                if len(self._idle) > MAX_IDLE:
                    self._idle.popitem(last=False)

    def _identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[bool, str], ClientLimits]:
        """Whether a token names the client, and its name; and its limits."""
        if caller := CALLER.get():
            return (True, caller.name), caller.limits or self._defaults
        if not self._key:
            return (False, ""), ClientLimits()
        name = next((str(value) for key, value in metadata if key == self._key), "")
        if len(name) > MAX_NAME:
            raise invalid(f"metadata.{self._key}", f"at most {MAX_NAME} characters, not {len(name)}")
        return (False, name), self._defaults


def _over(limit: str, value: float, what: str, retry_s: float) -> RpcError:
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT_LIMIT",
        f"the client has {what}, and no more for {retry_s:.3g} s",
        retry_s=retry_s,
        metadata={"limit": limit, "value": f"{value:g}"},
    )
