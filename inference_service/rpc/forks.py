"""A request's choices as the engine takes them: one prompt, a seed each."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from inference_service.messages import Submit

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, made odd: the step between the states of SplitMix64."""


def choice_seed(seed: int, choice: int) -> int:
    """The 64-bit seed of a request's choice: of choice 0 the request's own, else the output of SplitMix64 for `choice` steps from it.

    The mixing is a bijection, so the same choice of two requests has different seeds if the requests have, and two choices of one request
    always have. Those of requests with nearby seeds do not meet either: the step is far larger than what lies between them.
    (Steele, Lea and Flood, Fast splittable pseudorandom number generators, 2014; Vigna's constants.)
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * _GOLDEN) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return mixed ^ mixed >> 31


def fork(submit: Submit, keys: Iterable[int]) -> list[Submit]:
    """Further choices of a request, from 1 on, with these keys. What is said of the prompt is said by choice 0 alone."""
    return [
        replace(
            submit,
            key=key,
            fork_of=submit.key,
            sampling=replace(submit.sampling, seed=choice_seed(submit.sampling.seed, choice)),
            prompt_logprobs=-1,
        )
        for choice, key in enumerate(keys, 1)
    ]
