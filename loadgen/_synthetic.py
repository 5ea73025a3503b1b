"""Random prompts of given lengths: of token ids, so that lengths are exact whatever the tokenizer, or of words of one token each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from inference_service.config import Config
from inference_service.loadtest import Workload
from loadgen._forms import Content, check_conversation, choose_form, following, opening, settings
from loadgen._lengths import draw, largest
from loadgen._target import Model, Observation, Request, Takes, TargetError
from loadgen._vocabulary import load_tokenizer, prompt_ids, words

Pieces = list[Any]
"""Token ids, or words."""
BLOCK_TOKENS = 512
"""Of a prefix block in a trace, as in Mooncake's."""


class RandomPrompts:
    """Prompts that depend on (seed, index, turn) alone."""

    def __init__(self, config: Config, workload: Workload, model: Model, takes: Takes) -> None:
        """Raises TargetError where the lengths do not fit the model's context, or the target does not take such prompts."""
        self._seed = config.loadtest.seed
        self._workload = workload
        self._form = choose_form(workload, takes)
        if largest(workload.turns) > 1:
            check_conversation(self._form, takes)
        self._pieces: Pieces = prompt_ids(workload, model) if self._form == "token_ids" else words(load_tokenizer(config, workload))
        self._block = lru_cache(maxsize=4096)(self._make_block)
        _check_context(workload, model)

    def request(self, index: int, input_tokens: int | None, output_tokens: int | None, prefix_ids: Sequence[int]) -> Request:
        workload, noise = self._workload, self._noise(index)
        if input_tokens is None:
            input_tokens = draw(workload.input_tokens, noise)
        if output_tokens is None:
            output_tokens = draw(workload.output_tokens, noise)
        group, seed = noise.randrange(workload.prefix_groups), noise.getrandbits(31)
        if prefix_ids:
            prefix = [piece for prefix_id in prefix_ids for piece in self._block(prefix_id)][:input_tokens]
        else:
            prefix = self._draw(self._noise("group", group), round(workload.prefix_share * input_tokens))
        return Request(
            output_tokens=output_tokens,
            **settings(workload, seed, index),
            **opening(self._form, self._content(prefix + self._draw(noise, input_tokens - len(prefix)))),
        )

    def next_turn(self, request: Request, observation: Observation) -> Request | None:
        turn = request.turn + 1
        if turn >= draw(self._workload.turns, self._noise("turns", request.index)):
            return None
        noise = self._noise(request.index, turn)
        content = self._content(self._draw(noise, draw(self._workload.input_tokens, noise)))
        return following(request, observation, content, output_tokens=draw(self._workload.output_tokens, noise))

    def _noise(self, *key: object) -> random.Random:
        return random.Random("/".join(map(str, (self._seed, *key))))

    def _draw(self, noise: random.Random, count: int) -> Pieces:
        return noise.choices(self._pieces, k=count)

    def _make_block(self, prefix_id: int) -> Pieces:
        return self._draw(self._noise("block", prefix_id), BLOCK_TOKENS)

    def _content(self, pieces: Pieces) -> Content:
        return pieces if self._form == "token_ids" else " ".join(pieces)


def _check_context(workload: Workload, model: Model) -> None:
    turns = largest(workload.turns)
    needed = turns * (largest(workload.input_tokens) + largest(workload.output_tokens))
    if 0 < model.max_context < needed:
        lengths = "input_tokens + output_tokens" if turns == 1 else "turns * (input_tokens + output_tokens)"
        raise TargetError(f"loadtest.workload: {lengths} is {needed}, but {model.name} has a context of {model.max_context} tokens")
