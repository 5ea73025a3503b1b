"""Root-mean-square norms.

Shapes: T tokens, C hidden size.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, or where `zero_centered` * (1 + weight), added in float32."""

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor: ...

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        """Add x to the residual, in place, and give the residual's norm, which may take the place of x."""
        ...


class TorchNorm:
    """PyTorch's own norm."""

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        if zero_centered:
            return F.rms_norm(x_TC.float(), weight_C.shape, 1 + weight_C.float(), eps).to(x_TC.dtype)
        return F.rms_norm(x_TC, weight_C.shape, weight_C, eps)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        return self.rms_norm(residual_TC.add_(x_TC), weight_C, eps, zero_centered)
