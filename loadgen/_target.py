"""What every target has in common: the request it is given, what is observed of the answer, and the classes of errors.

A target turns a Request into calls of its server and notes in the Observation what arrived when. It computes no latency itself:
`_measures` does, so that TTFT, TPOT and ITL mean the same whatever is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from inference_service.telemetry.tracing import ClientSpan


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
class Message:
    """A message of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, which is in exactly one of its three forms, and how to continue it."""

    output_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    messages: tuple[Message, ...] = ()
    exact: bool = True
    """The answer has exactly `output_tokens`: the end-of-sequence token is ignored. Else at most so many."""
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: of all tokens."""
    seed: int | None = None
    """Below 2**31, which every server takes. None: the server draws one."""
    index: int = 0
    """Its number in the run, which its conversation's later turns share."""
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Takes:
    """What a target can be asked."""

    token_ids: bool = True
    text: bool = True
    messages: bool = False
    exact: bool = True
    """It can be told to ignore the end-of-sequence token."""
    answer_ids: bool = True
    """It says which token ids its answer has."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that the target serves."""

    name: str
    vocab_size: int
    """0: the target does not tell."""
    max_context: int
    """0: the target does not tell."""
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
    scheduled_ns: int = 0
    """When it was due, in an open loop."""
    queue_ns: int = 0
    """What the service says that it waited in the queue; 0: it does not say. So is the next."""
    server_ttft_ns: int = 0
    """From the request's arrival at the service to its first token."""
    trace_id: str = ""
    request_id: str = ""
    """As the target knows it; empty: it has none."""
    model: str = ""
    input_tokens: int = 0
    cached_tokens: int = 0
    """Of the input tokens, those that the server found in its prefix cache."""
    answer_ids: list[int] = field(default_factory=list)
    """What was answered, where the target tells the ids; a conversation goes on with it."""
    answer_text: list[str] = field(default_factory=list)
    """Its pieces, without reasoning, where the target sends text."""
    failure: Failure | None = None
    cut_off: bool = True
    """The stream has not ended by itself; stays so when the run's end cancels it."""

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.arrivals)

    @property
    def began_ns(self) -> int:
        """What decides to which window it belongs: when it was due, else when it was sent."""
        return self.scheduled_ns or self.sent_ns


def miscount(observation: Observation, request: Request, reported: int) -> Failure | None:
    """How an answer's length is wrong, if it is: the tokens received, those the server reports and those asked for must agree."""
    received = observation.output_tokens
    if received != reported:
        return Failure(ErrorClass.SERVER, "PROTOCOL", f"{received} token ids received, but usage.completion_tokens is {reported}")
    if received > request.output_tokens or (request.exact and received < request.output_tokens):
        return Failure(ErrorClass.SERVER, "PROTOCOL", f"{received} tokens received, but {request.output_tokens} were asked for")
    return None


def end_span(span: ClientSpan, observation: Observation) -> None:
    """Write the client's span of a request that is over."""
    arrivals = observation.arrivals
    observation.trace_id = span.traceparent[3:35]
    code, message = "OK", ""
    if observation.cut_off:
        code, message = "CANCELLED", "cut off by the load test's end"
    elif observation.failure:
        code, message = observation.failure.code, observation.failure.message
    span.end(
        code,
        message=message,
        end_ns=observation.ended_ns,
        first_token_ns=arrivals[0][0] if arrivals else 0,
        last_token_ns=arrivals[-1][0] if arrivals else 0,
        request_id=observation.request_id,
        model=observation.model,
        prompt_tokens=observation.input_tokens,
        completion_tokens=observation.output_tokens,
    )


class Target(Protocol):
    """A server under load. Made in the process that uses it, after Locust's fork."""

    protocol: str
    """Its name in Locust's own table."""
    takes: Takes

    def model(self) -> Model:
        """Ask what is served. Raises TargetError where nothing answers."""
        ...

    def generate(self, request: Request, observation: Observation) -> None:
        """Stream one answer to its end, filling in the observation as it comes; a failure is noted there, not raised.

        When the calling greenlet is killed the call is cancelled and GreenletExit goes on; what has arrived by then stays noted.
        """
        ...

    def close(self) -> None: ...
