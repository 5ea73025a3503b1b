"""Lengths that differ from request to request."""

from __future__ import annotations

import math
import random

from inference_service.loadtest import Lengths


def draw(lengths: int | Lengths, noise: random.Random) -> int:
    """One length. A fixed one takes nothing from `noise`."""
    if isinstance(lengths, int):
        return lengths
    match lengths.distribution:
        case "uniform":
            return noise.randint(lengths.min, lengths.max)
        case "normal":
            drawn = noise.gauss(lengths.mean, lengths.std)
        case "lognormal":
            # Of the logarithm, such that the lengths themselves have the mean and the deviation asked for.
            variance = math.log1p((lengths.std / lengths.mean) ** 2)
            drawn = noise.lognormvariate(math.log(lengths.mean) - variance / 2, math.sqrt(variance))
    return min(max(round(drawn), lengths.min), lengths.max)


def largest(lengths: int | Lengths) -> int:
    return lengths if isinstance(lengths, int) else lengths.max
