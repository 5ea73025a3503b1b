"""FlashInfer's fused norm and activation.

Shapes: T tokens, C hidden size, I intermediate size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inference_service.kernels.gemm import TorchGemm


class FlashInferNorm:
    """One launch a norm, the addition included."""

    def __init__(self) -> None:
        import flashinfer.norm

        self._norm: Any = flashinfer.norm.rmsnorm
        self._add_norm: Any = flashinfer.norm.fused_add_rmsnorm

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        y_TC: Tensor = self._norm(x_TC, weight_C, eps)
        return y_TC

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        self._add_norm(x_TC, residual_TC, weight_C, eps)
        return x_TC


class CublasGemm(TorchGemm):
    """PyTorch's linear, which is cuBLAS on a GPU, with FlashInfer's activation."""

    def __init__(self) -> None:
        import flashinfer.activation

        self._silu_and_mul: Any = flashinfer.activation.silu_and_mul

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        y_TI: Tensor = self._silu_and_mul(gate_up_T2I)
        return y_TI
