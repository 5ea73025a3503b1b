"""Products for some tokens on a GPU, where streaming the weight is all the work; cuBLAS for more.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.flashinfer_elementwise import CublasGemm
from inference_service.kernels.support_row import HALVES

GEMV_TOKENS = 1
"""Up to so many tokens a weight is streamed once a token (python -m baselines.kernels --operators gemm)."""
NARROW_OUTPUTS, NARROW_TOKENS = 256, 8
"""The same for narrow weights, such as a router's."""
SPLIT_TOKENS = {2048: 64, 4096: 16}
"""Up to so many tokens a product whose sum is split is faster than cuBLAS, by the most outputs: wider weights have programs enough."""
TINY_TOKENS = 8
"""One tile of tinygemm's."""


class TritonGemm(CublasGemm):
    """The own Triton kernels where their shapes and dtypes fit, else cuBLAS."""

    def __init__(self) -> None:
        super().__init__()
        from inference_service.kernels import triton_gemm, triton_split_gemm

        self._gemv: Any = triton_gemm.gemv
        self._split: Any = triton_split_gemm.gemm_split
        self._rows, self._block = triton_split_gemm.ROWS, triton_split_gemm.BLOCK

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        few = NARROW_TOKENS if len(packed) <= NARROW_OUTPUTS else GEMV_TOKENS
        if 0 < len(x_TK) <= few:
            product = self._gemv
        elif len(packed) % self._rows or packed.shape[1] % self._block or packed.dtype not in HALVES:
            return F.linear(x_TK, packed, bias_N)
        else:
            product = self._split
        y_TN: Tensor = product(x_TK.contiguous(), packed, bias_N)
        return y_TN


class TritonOrCublasGemm(TritonGemm):
    """The own kernels or cuBLAS, by the number of outputs and of tokens, which the host knows."""

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        few = next((tokens for outputs, tokens in SPLIT_TOKENS.items() if len(packed) <= outputs), GEMV_TOKENS)
        return super().__call__(x_TK, packed, bias_N) if len(x_TK) <= few else F.linear(x_TK, packed, bias_N)


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
