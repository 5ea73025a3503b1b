"""Requests of synthetic lengths, the very same ones in every run.

Prompts are random token ids, so their length is exact whatever the tokenizer. A prompt depends on (seed, process, number) alone: never on
timing, on the target or on what was sent before it.
"""

from __future__ import annotations

import random

from inference_service.config import Loadtest
from loadgen._target import Model, Request, TargetError


class SyntheticWorkload:
    """Numbered requests of `loadtest.workload`; `process` tells the prompts of one load generator process from those of another."""

    def __init__(self, loadtest: Loadtest, model: Model, process: int = 0) -> None:
        """Raises TargetError where the lengths do not fit the model's context, or the vocabulary is not known."""
        self._workload = loadtest.workload
        self._key = f"{loadtest.seed}/{process}"
        self._ids = _prompt_ids(loadtest, model)
        self._next = 0
        needed = self._workload.input_tokens + self._workload.output_tokens
        if 0 < model.max_context < needed:
            raise TargetError(
                f"loadtest.workload: input_tokens + output_tokens is {needed}, but {model.name} has a context of {model.max_context} tokens"
            )

    def request(self, number: int) -> Request:
        noise = random.Random(f"{self._key}/{number}")
        return Request(
            token_ids=noise.choices(self._ids, k=self._workload.input_tokens),
            output_tokens=self._workload.output_tokens,
            temperature=self._workload.temperature,
            top_p=self._workload.top_p,
            seed=noise.getrandbits(63) if self._workload.seeded else None,
        )

    def next(self) -> Request:
        """The request after the one before it, from number 0."""
        number, self._next = self._next, self._next + 1
        return self.request(number)


def _prompt_ids(loadtest: Loadtest, model: Model) -> list[int]:
    """The token ids of prompts. With a vocabulary of the settings' all targets get the same, whatever they know of their own."""
    vocab_size = loadtest.workload.vocab_size
    if not model.vocab_size and not vocab_size:
        raise TargetError(f"loadtest.workload.vocab_size: the target of {model.name} does not tell its vocabulary's size, so set it here")
    if model.vocab_size and vocab_size > model.vocab_size:
        raise TargetError(f"loadtest.workload.vocab_size: {vocab_size}, but that of {model.name} is {model.vocab_size}")
    if vocab_size:
        return list(range(vocab_size))
    return [token_id for token_id in range(model.vocab_size) if token_id not in model.eos_token_ids]
