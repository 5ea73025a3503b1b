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
"""Up to so many tokens a product whose sum is split is faster than cuBLAS, by the most outputs; of wider weights few gained."""
SPLIT_ROWS, SPLIT_INPUTS = 64, 64
"""Of which its outputs and inputs are multiples."""
TINY_TOKENS = 8
"""One tile of tinygemm's."""


def own_kernel(tokens: int, outputs: int, inputs: int) -> str:
    """Which own kernel takes such a product: gemv, split, or none, as an empty string."""
    if 0 < tokens <= (NARROW_TOKENS if outputs <= NARROW_OUTPUTS else GEMV_TOKENS):
        return "gemv"
    return "" if outputs % SPLIT_ROWS or inputs % SPLIT_INPUTS else "split"


def is_faster_split(tokens: int, outputs: int) -> bool:
    """Than cuBLAS."""
    return tokens <= next((most for widest, most in SPLIT_TOKENS.items() if outputs <= widest), 0)


class TritonGemm(CublasGemm):
    """The own Triton kernels where shapes and dtypes fit, else cuBLAS."""

    def __init__(self) -> None:
        super().__init__()
        from inference_service.kernels import triton_gemm, triton_split_gemm

        self._kernels: dict[str, Any] = {"gemv": triton_gemm.gemv, "split": triton_split_gemm.gemm_split}

    def choose(self, x_TK: Tensor, packed: Tensor) -> str:
        name = own_kernel(len(x_TK), *packed.shape)
        return "" if name == "split" and packed.dtype not in HALVES else name

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        name = self.choose(x_TK, packed)
        if not name:
            return F.linear(x_TK, packed, bias_N)
        y_TN: Tensor = self._kernels[name](x_TK.contiguous(), packed, bias_N)
        return y_TN


class TritonOrCublasGemm(TritonGemm):
    """The own kernels or cuBLAS, by the number of outputs and of tokens, which the host knows."""

    def choose(self, x_TK: Tensor, packed: Tensor) -> str:
        name = super().choose(x_TK, packed)
        return "" if name == "split" and not is_faster_split(len(x_TK), len(packed)) else name


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
