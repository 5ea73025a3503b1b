"""FlashInfer's fused norm and activation.

Shapes: T tokens, C hidden size, I intermediate size.
"""

from __future__ import annotations

from torch import Tensor

from inference_service.kernels.gemm import TorchGemm


class FlashInferNorm:
    """One launch a norm, the addition included."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        return self._ops.rms_norm(x_TC, weight_C, eps, zero_centered)

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
        self._ops.add_rms_norm(x_TC, residual_TC, weight_C, eps, zero_centered)
        return x_TC


class CublasGemm(TorchGemm):
    """PyTorch's linear, which is cuBLAS on a GPU, with FlashInfer's activation."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return self._ops.silu_and_mul(gate_up_T2I)

    def gelu_tanh_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return self._ops.gelu_tanh_and_mul(gate_up_T2I)
