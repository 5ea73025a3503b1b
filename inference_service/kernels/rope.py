"""Rotary position embedding, in the rotate-half form of Hugging Face checkpoints: each pair (x[i], x[i + D/2]) turns by its position's
i-th angle.

Shapes: T tokens, H heads (query and key alike), D head dim, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotations(table_PD: Tensor, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What `rotate` needs for tokens at these positions. `table_PD`: cosines of the D/2 angles, then their sines, in float32."""
    cos, sin = table_PD.index_select(0, positions_T).to(dtype).chunk(2, dim=-1)
    return torch.stack((torch.stack((cos, cos), dim=1), torch.stack((-sin, sin), dim=1))).unsqueeze(2)


def rotate(x_THD: Tensor, rotations: Tensor) -> None:
    """Rotate in place: x cos + flip(x) (-sin, sin), with x seen as its two halves."""
    cos, sin = rotations.unbind()
    halves = x_THD.view(*x_THD.shape[:-1], 2, -1)
    swapped = halves.flip(-2)
    halves.mul_(cos).addcmul_(swapped, sin)
