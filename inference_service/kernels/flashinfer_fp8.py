"""Weights in FP8 on a GPU: own Triton kernels, and FlashInfer's DeepGEMM, which takes over in products of many tokens.

All round activations to FP8, with a scale for each 128 values of a token's, but for the kernels for one or two tokens.

Shapes as in `fp8`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inference_service.kernels.flashinfer_moe import FEW_TOKENS
from inference_service.kernels.fp8 import BLOCK, BlockFp8

GEMV_TOKENS = 2
"""Up to so many tokens a weight is streamed once a token (benchmarks/fp8.py)."""
OWN_TOKENS = 32
"""Up to so many tokens the own product is faster than DeepGEMM."""


class DeepGemmFp8:
    """`flashinfer.gemm.fp8_blockscale_gemm_sm90`."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops

    def __call__(self, x_TK: Tensor, weight: BlockFp8) -> Tensor:
        return self._ops.fp8_block_gemm(x_TK, weight.values, weight.scales)


class TritonFp8Gemm:
    """The own Triton kernels."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_fp8, triton_split_gemm

        self._gemv: Any = triton_fp8.gemv_fp8
        self._split: Any = triton_split_gemm.gemm_fp8_split

    def __call__(self, x_TK: Tensor, weight: BlockFp8) -> Tensor:
        product = self._gemv if len(x_TK) <= GEMV_TOKENS else self._split
        y_TN: Tensor = product(x_TK.contiguous(), weight.values, weight.scales)
        return y_TN


class TritonOrDeepGemmFp8:
    """The one or the other by the number of tokens, which the host knows."""

    def __init__(self) -> None:
        self._few, self._many = TritonFp8Gemm(), DeepGemmFp8()

    def __call__(self, x_TK: Tensor, weight: BlockFp8) -> Tensor:
        return self._few(x_TK, weight) if len(x_TK) <= OWN_TOKENS else self._many(x_TK, weight)


class CutlassFp8Moe:
    """`flashinfer.fused_moe.cutlass_fused_moe`, whose products of FP8 blocks are DeepGEMM's; there is nothing to tune in them."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops
        from inference_service.kernels.expert_tactics import expert_tactics

        expert_tactics()
        self._ops = flashinfer_ops

    def __call__(self, x_TC: Tensor, gate_up: BlockFp8, down: BlockFp8, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._ops.cutlass_moe_fp8(x_TC, gate_up.values, gate_up.scales, down.values, down.scales, ids_TK, weights_TK)


class TritonFp8Moe:
    """The own Triton kernels: for one or two tokens those that stream each chosen expert once a token, for more once for 16, then tiles."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from inference_service.kernels import triton_fp8, triton_grouped, triton_tiled

        self._gemv: Any = triton_fp8.moe_gemv_fp8
        self._grouped: Any = triton_grouped.moe_grouped_fp8
        self._tiled: Any = triton_tiled.moe_tiled_fp8

    def __call__(self, x_TC: Tensor, gate_up: BlockFp8, down: BlockFp8, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if len(x_TC) <= GEMV_TOKENS or x_TC.shape[1] % BLOCK:
            kernels = self._gemv
        else:
            kernels = self._grouped if ids_TK.numel() <= FEW_TOKENS * len(down.values) else self._tiled
        y_TC: Tensor = kernels(x_TC, gate_up.values, gate_up.scales, down.values, down.scales, ids_TK, weights_TK, up_first=True)
        return y_TC
