"""How many different experts a step touches: what shows whether a speed was measured with routing as spread as a real model's.

Counted now and then, of steps of decodes alone, from the choices that the layers have left behind: within a CUDA graph nothing is added.

Shapes: L layers with experts, A choices (tokens times experts a token), E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 32
"""One step of so many is counted."""


class ExpertCounter:
    """Says which steps to count, and counts them, on their device."""

    def __init__(self, experts: int) -> None:
        """`experts` of a layer; 0 for a model without any."""
        self._experts = experts
        self._steps = 0

    def wants(self, decodes_alone: bool) -> bool:
        """Whether to count the step that is launched now."""
        self._steps += decodes_alone and self._experts > 0
        return decodes_alone and self._experts > 0 and self._steps % STEPS == 0

    def count(self, chosen: list[Tensor], tokens: int) -> Tensor:
        """Different experts among the first `tokens`, a layer on average: a float32 scalar. `chosen` holds ids_TK of each layer."""
        ids_LA = torch.stack([ids_TK[:tokens] for ids_TK in chosen]).flatten(1).long()
        seen_LE = torch.zeros(len(ids_LA), self._experts, dtype=torch.float32, device=ids_LA.device)
        return seen_LE.scatter_(1, ids_LA, 1.0).sum() / len(ids_LA)
