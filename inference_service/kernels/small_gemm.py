"""Products for a few tokens on a GPU, where streaming the weight is all the work; cuBLAS for more.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.flashinfer_elementwise import CublasGemm

GEMV_TOKENS = 1
"""Up to so many tokens the own kernel is faster than cuBLAS (python -m baselines.kernels --operators gemm)."""
NARROW_OUTPUTS, NARROW_TOKENS = 256, 8
"""The same for narrow weights, such as a router's: cuBLAS takes 5 us there, however little there is to do."""
TINY_TOKENS = 8
"""One tile of tinygemm's."""


class GemvOrCublasGemm(CublasGemm):
    """The own Triton matrix-vector kernel, or cuBLAS, by the number of tokens, which the host knows."""

    def __init__(self) -> None:
        super().__init__()
        from inference_service.kernels import triton_gemm

        self._gemv: Any = triton_gemm.gemv

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        limit = NARROW_TOKENS if len(packed) <= NARROW_OUTPUTS else GEMV_TOKENS
        if not 0 < len(x_TK) <= limit:
            return F.linear(x_TK, packed, bias_N)
        y_TN: Tensor = self._gemv(x_TK.contiguous(), packed, bias_N)
        return y_TN


class TinyGemm(CublasGemm):
    """FlashInfer's tinygemm, made for latency, where its alignment fits; else cuBLAS."""

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        outputs, inputs = packed.shape
        if not 0 < len(x_TK) <= TINY_TOKENS or inputs % 64 or outputs % 16:
            return F.linear(x_TK, packed, bias_N)
        y_TN: Tensor = self._ops.tinygemm(x_TK.contiguous(), packed, bias_N)
        return y_TN


class CuteDslGemm(CublasGemm):
    """FlashInfer's kernels for few tokens on Blackwell, written in the CuTe DSL, where `gemm.fits_cute_dsl`; else cuBLAS."""

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        y_TN: Tensor = self._ops.cute_dsl_gemm(x_TK, packed, bias_N)
        return y_TN
