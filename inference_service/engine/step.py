"""The interface between scheduler and executor: what a step computes, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from inference_service.messages import Kernel, Sampling, TokenLogprobs


@dataclass(slots=True)
class Row:
    """One request's part of a step: the tokens [start, start + length) of its sequence.

    A decode row has length 1 and takes its input id from the device, where the step before left it (`token_ids` is empty): the host may
    not know it yet. A prefill row brings its ids.
    """

    slot: int
    """The request's place in the device's buffers, in [0, max_requests)."""
    start: int
    """Tokens of the sequence whose keys and values are in the cache already."""
    length: int
    token_ids: list[int]
    """The ids to compute; empty for a decode."""
    pages: list[int]
    """The sequence's pages, in order; they cover start + length tokens."""
    samples: bool
    """Whether the row's last token has all before it computed, so that the next token is drawn (False: a chunk that is not the last)."""
    sampling: Sampling
    logprobs: int = -1
    """Alternatives to give with the sampled token; -1: no log-probabilities."""
    banned_ids: list[int] = field(default_factory=list)
    """Ids that must not be drawn in this step (stop tokens before min_tokens, words of one token)."""
    banned_after: list[tuple[int, int]] = field(default_factory=list)
    """Pairs: where the sequence's last token is the first id, the second must not be drawn. For words whose end the host cannot yet see."""
    history: list[int] = field(default_factory=list)
    """The whole sequence, in the first row that samples since the request took its slot, where penalties count tokens; else empty."""
    prompt_tokens: int = 0
    """With `history`: how many of it are the prompt's."""
    prompt_logprobs: int = -1
    """Alternatives to give for each of `next_ids`; -1: no log-probabilities of them."""
    next_ids: list[int] = field(default_factory=list)
    """With `prompt_logprobs`: the prompt's tokens that follow each of the row's, as far as the prompt goes."""
    allowed: bytes = b""
    """A bit a token id of the vocabulary, little-endian in 32-bit words: those that the grammar permits next. Empty: all."""
    known_plain: bool = False
    """Who made the row knows that it `is_plain`, which takes longer to find out, and every row of every step is asked."""

    @property
    def is_decode(self) -> bool:
        return not self.token_ids

    @property
    def is_plain(self) -> bool:
        """Whether the row wants its next token alone, drawn from the logits as the model gives them."""
        return self.known_plain or not (
            self.logprobs >= 0
            or self.banned_ids
            or self.banned_after
            or self.allowed
            or self.prompt_logprobs >= 0
            or self.sampling.changes_logits
        )

    @property
    def position(self) -> int:
        """Where the sampled token will stand in the sequence; the noise of the draw is keyed by it."""
        return self.start + self.length


@dataclass(slots=True)
class StepPlan:
    """What one step computes: decode rows first, then prefill rows."""

    rows: list[Row]
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy before anything else: from, to."""

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)


@dataclass(slots=True)
class StepResult:
    """What the sampling rows of a step drew, in their order in the plan."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    """One entry a sampling row; None where the row asked for none."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By the row's place in the plan, for rows that asked: one entry for each of its `next_ids`."""
    distinct_experts: float | None = None
    """Different experts that the step's tokens chose, a layer on average; counted now and then, in steps of decodes alone."""


class Ticket(Protocol):
    """A launched step."""

    def ended(self, timeout_s: float) -> bool:
        """Wait at most so long for the step to end, and say whether it has. May wait longer where only the device knows."""
        ...

    def wait(self) -> StepResult:
        """Block until the step's ids are on the host. Raises what the step raised."""
        ...


@dataclass(frozen=True)
class ExecutorInfo:
    """What the executor has loaded and sized."""

    architecture: str
    dtype: str
    parameters: int
    vocab_size: int
    max_context: int
    device: str
    device_arch: str
    pages: int
    kernels: list[Kernel]


class Executor(Protocol):
    """Runs steps in the order of their launch.

    `launch` returns at once. The next step may be launched while this one runs; its decode rows read the ids that this one sampled.
    A page that an earlier launched step writes may be reused by a later one: order keeps them apart.
    """

    info: ExecutorInfo

    @property
    def compiles(self) -> int:
        """Kernels compiled, or loaded for the first time, since the start: 0, unless the start has missed something that a request met."""
        ...

    @property
    def fused_steps(self) -> int:
        """Steps since the start with decodes and prefill chunks whose attention was one launch planned on the host."""
        ...

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step. The plan has been read when this returns: its lists may change afterwards."""
        ...

    def close(self) -> None:
        """Let launched steps end and free what the executor holds."""
        ...
