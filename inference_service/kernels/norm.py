"""Root-mean-square norms.

Shapes: T tokens, C hidden size, H heads, D head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """Add x to the residual, in place, and give the residual's norm."""
        ...

    def qk_norm(self, q_THD: Tensor, k_THD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, eps: float) -> None:
        """Norm each head of q and k in place."""
        ...


class TorchNorm:
    """PyTorch's own norm."""

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x_TC, weight_C.shape, weight_C, eps)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual_TC.add_(x_TC), weight_C, eps)

    def qk_norm(self, q_THD: Tensor, k_THD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, eps: float) -> None:
        q_THD.copy_(self.rms_norm(q_THD, q_weight_D, eps))
        k_THD.copy_(self.rms_norm(k_THD, k_weight_D, eps))
