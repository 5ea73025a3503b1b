"""What the own Triton kernels share: programmatic dependent launch, block sizes, and launches for parts of many tokens.

With dependent launch a kernel's blocks are placed while the kernel before still drains. It is right beside any neighbour as long as each
kernel waits (`gdc_wait`) before it touches memory that another writes, and lets its successor start only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that has the constexpr PDL."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def divisor(size: int, limit: int) -> int:
    """The largest power of two that divides `size`, at most `limit`."""
    return min(size & -size, limit)


def block(size: int, limit: int) -> int:
    """A power of two to cut `size` by: a divisor where that is wide enough for vector loads, else one that needs a mask at the end."""
    even = divisor(size, limit)
    return even if even >= 64 else min(limit, 1 << max(size - 1, 1).bit_length())


def in_parts(
    launch: Callable[[Tensor, Tensor, Tensor, Tensor], None], most_pairs: int, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """What experts' kernels write to y_TC, the last argument of `launch`, for so many pairs of a token and an expert at a time."""
    y_TC = torch.empty_like(x_TC)
    most = max(most_pairs // ids_TK.shape[1] // 16 * 16, 16)  # so that all parts begin where vectors of 16 bytes do
    for first in range(0, len(x_TC), most):
        part = slice(first, first + most)
        launch(x_TC[part], ids_TK[part], weights_TK[part], y_TC[part])
    return y_TC
