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

        self._norms: list[Any] = [flashinfer.norm.rmsnorm, flashinfer.norm.gemma_rmsnorm]
        self._add_norms: list[Any] = [flashinfer.norm.fused_add_rmsnorm, flashinfer.norm.gemma_fused_add_rmsnorm]

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        y_TC: Tensor = self._norms[zero_centered](x_TC, weight_C, eps)
        return y_TC

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        self._add_norms[zero_centered](x_TC, residual_TC, weight_C, eps)
        return x_TC


class CublasGemm(TorchGemm):
    """PyTorch's linear, which is cuBLAS on a GPU, with FlashInfer's activation."""

    def __init__(self) -> None:
        import flashinfer.activation

        self._silu_and_mul: Any = flashinfer.activation.silu_and_mul
        self._gelu_tanh_and_mul: Any = flashinfer.activation.gelu_tanh_and_mul

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        y_TI: Tensor = self._silu_and_mul(gate_up_T2I)
        return y_TI

    def gelu_tanh_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        y_TI: Tensor = self._gelu_tanh_and_mul(gate_up_T2I)
        return y_TI
