"""SamplingParams checked and completed with the model's defaults."""

from __future__ import annotations

import math
import random

from inference.v1 import generate_pb2
from inference_service.messages import Sampling
from inference_service.rpc.errors import invalid
from inference_service.text.tokenizer import Tokenizer

MAX_BIASED_IDS = 1024
MAX_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_WORD_LENGTH = 128
REPETITION_PENALTIES = (0.01 * (1 - 2**-24), 100.0)
"""Beyond these, logits would leave what float32 can hold. A request's 0.01 is a float32, which is a little less."""
MAX_PENALTY = 2.0


class SamplingReader:
    """Reads the sampling parameters of requests for one model. Every fault is an RpcError that names the field."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._defaults = tokenizer.sampling_defaults
        self._vocab_size = vocab_size

    def read(self, given: generate_pb2.SamplingParams) -> Sampling:
        """With every default resolved; a seed is drawn where none is given."""
        defaults = self._defaults
        temperature = given.temperature if given.HasField("temperature") else defaults.temperature
        top_k = given.top_k if given.HasField("top_k") else defaults.top_k
        top_p = given.top_p if given.HasField("top_p") else defaults.top_p
        min_p = given.min_p if given.HasField("min_p") else defaults.min_p
        repetition = given.repetition_penalty if given.HasField("repetition_penalty") else defaults.repetition_penalty
        if not (0 <= temperature < math.inf):
            raise invalid("sampling.temperature", f"must be at least 0 and finite, not {temperature:g}")
        if not (0 < top_p <= 1):
            raise invalid("sampling.top_p", f"must be in (0, 1], not {top_p:g}")
        if not (0 <= min_p <= 1):
            raise invalid("sampling.min_p", f"must be in [0, 1], not {min_p:g}")
        _check_range("sampling.repetition_penalty", repetition, *REPETITION_PENALTIES)
        _check_range("sampling.frequency_penalty", given.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_range("sampling.presence_penalty", given.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        return Sampling(
            temperature,
            top_k,
            top_p,
            min_p,
            given.seed if given.HasField("seed") else random.getrandbits(64),
            repetition,
            given.frequency_penalty,
            given.presence_penalty,
            self._logit_bias(given),
            self._bad_words(given),
        )

    def _logit_bias(self, given: generate_pb2.SamplingParams) -> list[tuple[int, float]]:
        field, biases = "sampling.logit_bias", sorted(given.logit_bias.items())
        if len(biases) > MAX_BIASED_IDS:
            raise invalid(field, f"at most {MAX_BIASED_IDS} ids, not {len(biases)}")
        for token_id, bias in biases:
            if token_id >= self._vocab_size:
                raise invalid(field, f"id {token_id} is outside the vocabulary of {self._vocab_size}")
            _check_range(field, bias, -MAX_BIAS, MAX_BIAS)
        return biases

    def _bad_words(self, given: generate_pb2.SamplingParams) -> list[list[int]]:
        field, words = "sampling.bad_words", given.bad_words
        if len(words) > MAX_BAD_WORDS:
            raise invalid(field, f"at most {MAX_BAD_WORDS} words, not {len(words)}")
        if not all(0 < len(word) <= MAX_WORD_LENGTH for word in words):
            raise invalid(field, f"a word must have 1 to {MAX_WORD_LENGTH} characters")
        spellings = {tuple(ids) for word in words for ids in self._tokenizer.encode_word(word)}
        # What the model has no logits for cannot be output anyway.
        return [list(ids) for ids in sorted(spellings) if max(ids) < self._vocab_size]


def _check_range(field: str, value: float, least: float, most: float) -> None:
    if not (least <= value <= most):
        raise invalid(field, f"must be in [{least:g}, {most:g}], not {value:g}")
