"""What crosses between the front end and the engine: msgpack frames over a ZeroMQ socket. Both sides import this and nothing of each other.

Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import msgspec

from inference_service.config import Config


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The base of all messages: positional on the wire, so new fields go last."""


class EngineStart(msgspec.Struct, frozen=True):
    """What the engine's process is given on its standard input, as JSON."""

    config: Config
    model_dir: str
    address: str
    """Where the engine binds its ZeroMQ socket; front ends connect to it."""
    parent_pid: int
    """The process that starts the engine, which ends when that is gone."""


# --- front end to engine ---


class Sampling(Frame, frozen=True):
    """How a request's tokens are drawn; every default is resolved."""

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 keeps all."""
    top_p: float
    min_p: float
    seed: int
    """64 bits, one for each choice of a request; noise depends on (seed, position) alone."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = []
    bad_words: list[list[int]] = []
    """Token sequences, none empty, that the answer must not contain."""

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often it occurred."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def changes_logits(self) -> bool:
        """Whether logits get other finite values than the model gave them."""
        return bool(self.logit_bias) or self.has_penalties


class Grammar(Frame, frozen=True):
    """The language that an answer must belong to."""

    kind: str
    """json_schema, regex, grammar (EBNF) or choices."""
    text: str
    """The schema, the expression, the grammar; of choices, a JSON list of strings."""
    end_ids: list[int]
    """The model's end-of-sequence tokens, permitted wherever the language permits the end."""
    ignore_end: bool = False
    """Goes on for as long as the language permits: `end_ids` are never drawn."""


class Submit(Frame, frozen=True, tag="submit"):
    """Starts a request. The front end has validated it: it fits the context and, alone, the KV cache."""

    key: int
    """Unique within the front end's life."""
    token_ids: list[int]
    """The prompt; at least one token."""
    sampling: Sampling
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    """End-of-sequence tokens included, unless ignored."""
    logprobs: int
    """Alternatives to give for each token; -1: no log-probabilities at all."""
    arrival_ns: int
    deadline_ns: int
    """0: none."""
    prompt_logprobs: int = -1
    """As `logprobs`, for the prompt's tokens."""
    priority: int = 0
    """A larger one runs first."""
    cache_salt: str = ""
    """Pages of the prefix cache are shared among requests of one salt."""
    fork_of: int = -1
    """The key of another choice of the same request, whose prompt's pages this one takes over (and so no prompt_logprobs); -1: none."""
    grammar: Grammar | None = None
    request_id: str = ""
    """The client's name for it, in flight once among all front ends; of all choices of a request the same. Empty: none."""


class Abort(Frame, frozen=True, tag="abort"):
    """Ends requests without a further word about them."""

    keys: list[int]


class AbortById(Frame, frozen=True, tag="abort_by_id"):
    """Ends a request of whichever front end, which is told so; Aborted answers."""

    request_id: str
    call: int
    """What the answer says again."""


class Hello(Frame, frozen=True, tag="hello"):
    """The first frame of a front end: from now on the engine knows where to send."""

    watches: bool = False
    """Not a front end, but who started the engine: it is told how the start gets on and what goes wrong, and hears heartbeats alone."""


class Gone(Frame, frozen=True, tag="gone"):
    """A front end has died, and its requests with it."""

    name: bytes
    """The identity of its socket, never used again."""


class Profile(Frame, frozen=True, tag="profile"):
    """Record what the executor computes; the file tells the end."""

    path: str
    seconds: float


ToEngine = Submit | Abort | AbortById | Hello | Gone | Profile


# --- engine to front end ---


class TokenLogprobs(Frame, frozen=True):
    """Log-probabilities at one position: of the token itself, and of the most probable ones, best first."""

    chosen: float
    top_ids: list[int]
    top: list[float]


class Finish(Frame, frozen=True):
    """Why a request ended: "stop", "length", "deadline", "abort", "invalid" (before its first step), "failed", or "duplicate": its
    request_id was in flight. At a client's wish a front end adds "abort" itself."""

    reason: str
    stop_token_id: int = -1
    """The token that ended it, with "stop"."""
    error: str = ""
    """With "invalid" and "failed": what is wrong with the grammar."""


class Output(Frame, frozen=True):
    """What one step made for one request."""

    key: int
    token_ids: list[int]
    """New ids; a stop token is left out (Finish has it). Empty after a prefill chunk that was not the last."""
    logprobs: list[TokenLogprobs] | None = None
    scheduled_ns: int = 0
    """When the request was first put into a step; set in its first output only."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; set with scheduled_ns."""
    finish: Finish | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of prompt tokens that a prefill chunk has computed, in order, from the second on: nothing comes before the first."""
    preemptions: int = 0
    """So far. Not in Finish, since the front end ends an answer by itself at a stop string, or at its client's wish."""


class Load(Frame, frozen=True):
    """How busy the engine is."""

    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    waiting_tokens: int = 0
    """Of the prompts of those that wait."""
    output_tokens: int = 0
    """Ids of answers since the engine was ready, of all front ends."""


class Kernel(Frame, frozen=True):
    """The kernel chosen for an operator, and why."""

    operator: str
    backend: str
    reason: str


class Ready(Frame, frozen=True, tag="ready"):
    """The engine has loaded its model and made a first token."""

    architecture: str
    dtype: str
    parameters: int
    vocab_size: int
    max_context: int
    device: str
    device_arch: str
    page_size: int
    pages: int
    kernels: list[Kernel]
    prefill_tokens: int
    """Most prefill tokens of a step that also decodes."""
    pid: int = 0
    """The engine's process."""


class Progress(Frame, frozen=True, tag="progress"):
    """Where the engine's start has got to; shown to the operator, and a sign of life."""

    what: str


class Failed(Frame, frozen=True, tag="failed"):
    """The engine cannot start or go on; its process ends after this."""

    error: str


class ExpertSample(Frame, frozen=True):
    """A step of decodes whose experts were counted."""

    batch: int
    distinct: float
    """Different experts, a layer on average."""


class StepWork(Frame, frozen=True):
    """What a step computed, for metrics."""

    rows: int
    """Requests."""
    prefill_tokens: int
    duration_ns: int
    """From the end of the step before, or from its launch where that came later, to its ids' arrival on the host."""
    preemptions: int
    """Since the step before."""


class Step(Frame, frozen=True, tag="step"):
    """The outputs of one step. A frame without outputs is a heartbeat."""

    time_ns: int
    """When the step's token ids had reached the host."""
    outputs: list[Output]
    load: Load
    experts: ExpertSample | None = None
    compiles: int = 0
    """Kernels compiled or loaded since the engine was ready, in all."""
    work: StepWork | None = None
    fused_steps: int = 0
    """Steps with decodes and prefill chunks whose attention was one launch planned on the host, as POD is, in all."""


class Aborted(Frame, frozen=True, tag="aborted"):
    """The answer to AbortById."""

    call: int
    found: bool


ToFrontEnd = Ready | Progress | Failed | Step | Aborted
