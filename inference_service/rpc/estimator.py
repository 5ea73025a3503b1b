"""How long a request that comes now would wait for its first token, and how long its answer would take, by what the engine did lately.

Two things may hold up the first token, whichever takes longer: the requests ahead, of which one must end for each that begins, and the
prompt tokens ahead, which have to be computed. What is not known is taken for the better, so that the estimate errs to the short side, as
far as the near future is like the recent past.
"""

from __future__ import annotations

from collections import deque
from math import exp
from statistics import median

from inference_service.messages import StepWork

ENOUGH = 8
"""Steps, requests and answers that have ended: with fewer, nothing is said of these."""
LATEST = 64
"""Steps, and answers, of whose times the median counts: one that took long, since something had to be set up, says nothing of the next."""
BEST_S = 10.0
"""The best rate of prefill is forgotten over about so many seconds of computing."""
ENDS_S = 30.0
"""The rate at which requests end is the average over about so many seconds in which others waited for that. It is forgotten over about so
many in which none did."""
PROMPTS = 100_000.0
"""The share of prompts that the cache has is the average over about so many of their tokens."""


class Recent:
    """Two sums that grow together: `events`, and the `span` in which they came. What was added long ago fades."""

    def __init__(self, memory: float) -> None:
        """`memory`: the span after which a thing weighs 1/e of what it did."""
        self.events = self.span = 0.0
        self._memory = memory

    def add(self, events: float, span: float) -> None:
        self.fade(span)
        self.events += events
        self.span += span

    def fade(self, span: float) -> None:
        """So much went by that tells nothing: the same quotient, of less weight."""
        keep = exp(-span / self._memory)
        self.events *= keep
        self.span *= keep


class Estimator:
    """Learns from the engine's steps, and from the requests of this front end, of which alone it then tells."""

    def __init__(self, chunk_tokens: int) -> None:
        """`chunk_tokens`: prompt tokens that any step can compute, whatever else it does."""
        self._chunk_tokens = chunk_tokens
        self._steps: deque[float] = deque(maxlen=LATEST)
        self._answers: deque[float] = deque(maxlen=LATEST)
        """Seconds of each."""
        self._ends = Recent(ENDS_S)
        self._prompts = Recent(PROMPTS)
        self._best_prefill = 0.0
        """Prompt tokens a second in the best of the latest steps."""
        self._ended = 0

    def step(self, work: StepWork, waiting: int) -> None:
        """The engine has computed a step, and so many requests wait for their turn."""
        seconds = work.duration_ns / 1e9
        self._steps.append(seconds)
        self._best_prefill *= exp(-seconds / BEST_S)
        if seconds:
            self._best_prefill = max(self._best_prefill, work.prefill_tokens / seconds)
        if waiting:
            self._ends.add(self._ended, seconds)
        else:
            self._ends.fade(seconds)
        self._ended = 0

    def ended(self, count: int) -> None:
        """Requests have ended and made room for others."""
        self._ended += count

    def prompt(self, tokens: int, cached: int) -> None:
        """A request's turn has come, and so much of its prompt was in the cache."""
        self._prompts.add(tokens - cached, tokens)

    def answered(self, seconds: float) -> None:
        """An answer is whole, so long after its request's turn had come."""
        self._answers.append(seconds)

    def first_token_s(self, requests_ahead: int, prompt_tokens: int) -> float | None:
        """Seconds to the first token, with so many requests before it and so many prompt tokens, its own included; None: not measured."""
        if len(self._steps) < ENOUGH:
            return None
        step_s = median(self._steps)
        turn_s = requests_ahead * self._ends.span / self._ends.events if self._ends.events >= ENOUGH else 0.0
        uncached = self._prompts.events / self._prompts.span if self._prompts.span else 1.0
        prefill_s = prompt_tokens * uncached / max(self._best_prefill, self._chunk_tokens / step_s) if step_s else 0.0
        return max(turn_s, prefill_s) + step_s

    def answer_s(self, min_tokens: int, max_tokens: float) -> float | None:
        """Seconds from a request's turn to its answer's end: as most take, within what its length allows. None: not measured."""
        if len(self._steps) < ENOUGH or len(self._answers) < ENOUGH:
            return None
        step_s = median(self._steps)
        return max(min_tokens * step_s, min(median(self._answers), max_tokens * step_s))
