"""With what a model is built, and the memory that its parts take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_service.kernels.fp8 import E4M3, BlockFp8, blocks
from inference_service.kernels.selection import Operators


@dataclass(frozen=True)
class Build:
    """With what a model is built."""

    operators: Operators
    dtype: torch.dtype
    device: torch.device
    fp8: bool = False
    """Whether weights of layers are in FP8, and stay so where there is an operator for it."""

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zeros_fp8(self, *shape: int) -> BlockFp8:
        """Zeros, since rows and columns that fill up blocks are never loaded."""
        *experts, rows, columns = shape
        scales = torch.zeros(*experts, blocks(rows), blocks(columns), dtype=torch.float32, device=self.device)
        return BlockFp8(torch.zeros(shape, dtype=E4M3, device=self.device), scales)
