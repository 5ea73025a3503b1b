"""Rotary position embedding, in the rotate-half form of Hugging Face checkpoints.

Shapes: T tokens, H heads (query and key alike), D head dim, P positions.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Rope(Protocol):
    """Rotates each pair (x[i], x[i + D/2]) by its position's i-th angle."""

    def plan(self, table_PD: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
        """What the layers of one step share. `table_PD`: cosines of the D/2 angles, then their sines, in float32."""
        ...

    def __call__(self, x_THD: Tensor, planned: Tensor) -> None:
        """Rotate in place."""
        ...


class TorchRope:
    """x cos + flip(x) (-sin, sin), with x seen as its two halves."""

    def plan(self, table_PD: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
        cos, sin = table_PD.index_select(0, positions_T).to(dtype).chunk(2, dim=-1)
        return torch.stack((torch.stack((cos, cos), dim=1), torch.stack((-sin, sin), dim=1))).unsqueeze(2)

    def __call__(self, x_THD: Tensor, planned: Tensor) -> None:
        cos, sin = planned.unbind()
        halves = x_THD.view(*x_THD.shape[:-1], 2, -1)
        swapped = halves.flip(-2)
        halves.mul_(cos).addcmul_(swapped, sin)
