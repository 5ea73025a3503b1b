"""What every target has in common: the request it is given, what is observed of the answer, and the classes of errors.

A target turns a Request into calls of its server and notes in the Observation what arrived when. It computes no latency itself:
`_measures` does, so that TTFT, TPOT and ITL mean the same whatever is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class TargetError(Exception):
    """The load test cannot begin; the message names the target or the key to change."""


class ErrorClass(StrEnum):
    """Why a request failed."""

    QUEUE_FULL = "queue_full"
    """The server had no room for it."""
    DEADLINE = "deadline"
    """It took longer than `loadtest.timeout_s`."""
    CANCELLED = "cancelled"
    """The server or somebody else ended it."""
    TRANSPORT = "transport"
    """The connection could not be made or was lost, or the server is going away."""
    REQUEST = "request"
    """The server refused it as wrong: the load test is set up wrong."""
    SERVER = "server"
    """All else: an internal error, or an answer that breaks the protocol."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it."""

    token_ids: list[int]
    output_tokens: int
    """Exactly so many are asked for: the end-of-sequence token is ignored."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Model:
    """The model that the target serves."""

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Failure:
    """How a request failed."""

    kind: ErrorClass
    code: str
    """The protocol's own name for it, such as RESOURCE_EXHAUSTED."""
    message: str


@dataclass(slots=True)
class Observation:
    """What was seen of one request. Times are `time.monotonic_ns()` of this process; 0 is "never"."""

    sent_ns: int = 0
    arrivals: list[tuple[int, int]] = field(default_factory=list)
    """(time received, tokens) of each message that brought tokens."""
    ended_ns: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    """Of the input tokens, those that the server found in its prefix cache."""
    failure: Failure | None = None
    cut_off: bool = True
    """The stream has not ended by itself; stays so when the run's end cancels it."""

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)


class Target(Protocol):
    """A server under load. Made in the process that uses it, after Locust's fork."""

    def model(self) -> Model:
        """Ask what is served. Raises TargetError where nothing answers."""
        ...

    def generate(self, request: Request, observation: Observation) -> None:
        """Stream one answer to its end, filling in the observation as it comes; a failure is noted there, not raised.

        When the calling greenlet is killed the call is cancelled and GreenletExit goes on; what has arrived by then stays noted.
        """
        ...

    def close(self) -> None: ...
