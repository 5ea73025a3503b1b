"""Random weights, for serving a published shape without its checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from inference_service.kernels.fp8 import E4M3, LARGEST
from inference_service.models.fp8 import SCALES

BOUND = 1e-3


def fill_dummy(weights: dict[str, Tensor], seed: int = 0) -> None:
    """Fill every weight uniformly in +-1e-3, as other engines' dummy loaders do; norms are 1, so that activations keep their size.

    The same seed gives the same weights on one device and in one dtype.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
            continue
        if name.endswith(SCALES):
            weight.fill_(BOUND / LARGEST)
            continue
        if weight.device not in generators:
            generators[weight.device] = torch.Generator(weight.device).manual_seed(seed)
        if weight.dtype == E4M3:
            values = torch.empty(weight.shape, device=weight.device).uniform_(-LARGEST, LARGEST, generator=generators[weight.device])
            weight.copy_(values)
        else:
            weight.uniform_(-BOUND, BOUND, generator=generators[weight.device])
