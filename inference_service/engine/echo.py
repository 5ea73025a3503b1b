"""An executor without a model: each token is the one before it plus 1. For measuring and testing the service around the model.

It needs no tensors, keeps the order and overlap of a real executor, and takes a set time a step, so that overload can be provoked exactly.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from inference_service.config import Config
from inference_service.engine.step import ExecutorInfo, Row, StepPlan, StepResult
from inference_service.messages import TokenLogprobs


@dataclass(frozen=True)
class EchoTicket:
    """A step that ends at a set time."""

    result: StepResult
    ends: float

    def ended(self, timeout_s: float) -> bool:
        """Whether the step's time is over, after `timeout_s` at most."""
        left = self.ends - time.monotonic()
        time.sleep(max(0.0, min(left, timeout_s)))
        return left <= timeout_s

    def wait(self) -> StepResult:
        """Block until the step's time is over."""
        time.sleep(max(0.0, self.ends - time.monotonic()))
        return self.result


class EchoExecutor:
    """Counts up from each prompt's last token id, modulo the vocabulary, past what is banned. It has no logits to bias or penalize."""

    compiles = fused_steps = 0

    def __init__(self, config: Config, vocab_size: int, max_context: int) -> None:
        cache = config.cache
        pages = cache.pages or config.batch.max_requests * -(-max_context // cache.page_size)
        self.info = ExecutorInfo("Echo", "none", 0, vocab_size, max_context, "none", "none", pages, [])
        self._step_s = config.model.echo_step_ms / 1000
        self._last = [0] * config.batch.max_requests
        self._ends = 0.0

    def launch(self, plan: StepPlan) -> EchoTicket:
        """Start a step after those before it."""
        self._ends = max(self._ends, time.monotonic()) + self._step_s
        ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for place, row in enumerate(plan.rows):
            if row.prompt_logprobs >= 0:
                prompt_logprobs[place] = [_certain(token_id, row.prompt_logprobs) for token_id in row.next_ids]
            if row.token_ids:
                self._last[row.slot] = row.token_ids[-1]
            if row.samples:
                token_id = self._last[row.slot] = _draw(row, self._last[row.slot], self.info.vocab_size)
                ids.append(token_id)
                logprobs.append(_certain(token_id, row.logprobs) if row.logprobs >= 0 else None)
        return EchoTicket(StepResult(ids, logprobs, prompt_logprobs), self._ends)

    def close(self) -> None:
        """Nothing is held."""


def _draw(row: Row, last: int, vocab_size: int) -> int:
    """The first id after `last` that grammar and bans permit; where there is none, the bans do not hold, as in execution/edits.py."""
    for permits in (_permits, _allows):
        for step in range(1, vocab_size + 1):
            token_id = (last + step) % vocab_size
            if permits(row, last, token_id):
                return token_id
    raise ValueError("the grammar permits no token")


def _permits(row: Row, last: int, token_id: int) -> bool:
    return _allows(row, last, token_id) and token_id not in row.banned_ids and (last, token_id) not in row.banned_after


def _allows(row: Row, last: int, token_id: int) -> bool:
    return not row.allowed or bool(row.allowed[token_id // 8] >> token_id % 8 & 1)


def _certain(token_id: int, alternatives: int) -> TokenLogprobs:
    return TokenLogprobs(0.0, [token_id][:alternatives], [0.0][:alternatives])
