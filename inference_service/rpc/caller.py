"""Who calls: the identity that a token proves, for whatever handles the call after the token was checked."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class ClientLimits:
    """How much one client may ask for. 0 is no limit."""

    streams: int = 0
    """Calls of Generate, Tokenize and Detokenize at once."""
    requests_per_s: float = 0.0
    """Each choice of Generate is one."""
    tokens_per_min: int = 0
    """Prompt and answer tokens."""


@dataclass(frozen=True)
class Caller:
    """A client whose token was right."""

    name: str
    limits: ClientLimits | None
    """Its own; None: those of the configuration."""


CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)
"""The call's client; None where no token is asked for."""


def of_caller(name: str) -> str:
    """A name that a client has chosen, made one that no other client can choose; as it is where no token is asked for."""
    caller = CALLER.get()
    return f"{caller.name} {name}" if caller else name
