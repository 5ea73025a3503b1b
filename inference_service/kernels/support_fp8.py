"""Rows of the support table for models whose weights are in FP8.

Where no kernel multiplies with them, weights are made plain when they are loaded, and `gemm` and `moe` are what computes.
"""

from __future__ import annotations

import torch

from inference_service.kernels import flashinfer_fp8, fp8
from inference_service.kernels.support_row import FLASHINFER, NO_E4M3, TRITON, UNEVEN_HIDDEN, Row, Setting

DEQUANTIZED = "dequantized"
"""The backend that is none."""
HOPPER = frozenset({"sm_90"})
TRITON_FP8 = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"})
BFLOAT16 = frozenset({torch.bfloat16})
NO_DEEP_GEMM = "FlashInfer's products of FP8 blocks are written for Hopper's instructions, which sm_90 alone has"
NO_BFLOAT16 = "its kernels are for bfloat16"
DEEP_GEMM = FLASHINFER | {"cuda": "12.8", "nvcc": "12.8"}
"""It compiles a kernel when it first meets a shape, always with nvcc."""


def _tiles(setting: Setting) -> bool:
    """Where the own experts were measured with many tokens too; uneven experts are filled up when they are loaded."""
    return setting.architecture in HOPPER and setting.dtype in BFLOAT16 and UNEVEN_HIDDEN not in setting.features


FP8_ROWS: tuple[Row, ...] = (
    Row(
        "gemm_fp8",
        "triton+deepgemm",
        flashinfer_fp8.TritonOrDeepGemmFp8,
        architectures=HOPPER,
        dtypes=BFLOAT16,
        elsewhere=NO_DEEP_GEMM,
        otherwise=NO_BFLOAT16,
        requires=DEEP_GEMM | TRITON,
    ),
    Row(
        "gemm_fp8",
        "deepgemm",
        flashinfer_fp8.DeepGemmFp8,
        architectures=HOPPER,
        dtypes=BFLOAT16,
        elsewhere=NO_DEEP_GEMM,
        otherwise=NO_BFLOAT16,
        requires=DEEP_GEMM,
    ),
    Row("gemm_fp8", DEQUANTIZED, fp8.dequantized),
    Row("gemm_fp8", "triton", flashinfer_fp8.TritonFp8Gemm, architectures=TRITON_FP8, elsewhere=NO_E4M3, requires=TRITON),
    Row("gemm_fp8", "torch", fp8.TorchFp8Gemm),
    Row(
        "moe_fp8",
        "cutlass",
        flashinfer_fp8.CutlassFp8Moe,
        architectures=HOPPER,
        dtypes=BFLOAT16,
        elsewhere=NO_DEEP_GEMM,
        otherwise=NO_BFLOAT16,
        lacks=frozenset({UNEVEN_HIDDEN}),
        requires=DEEP_GEMM,
    ),
    Row("moe_fp8", DEQUANTIZED, fp8.dequantized),
    Row(
        "moe_fp8",
        "triton",
        flashinfer_fp8.TritonFp8Moe,
        architectures=TRITON_FP8,
        elsewhere=NO_E4M3,
        preferred=_tiles,
        requires=TRITON,
    ),
    Row("moe_fp8", "torch", fp8.TorchFp8Moe),
)
