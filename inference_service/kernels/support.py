"""The support table: which backend of which operator runs on which architecture, in which dtype, and why not elsewhere.

A capability is looked up here, never found out by trying. Rows of an operator stand in the order of preference, which a row may
say otherwise where it was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from inference_service.kernels import (
    attention_mixed,
    attention_torch,
    flashinfer_elementwise,
    flashinfer_fa3,
    flashinfer_fmha_v2,
    flashinfer_moe,
    flashinfer_paged,
    flashinfer_pod,
    flashinfer_sampling,
    flashinfer_xqa,
    gemm,
    kv_append,
    moe,
    norm,
    routing,
    sampling,
    small_gemm,
)
from inference_service.kernels.support_fp8 import FP8_ROWS
from inference_service.kernels.support_latent import GROUPED_ROUTING_ROWS, INPUT_ROUTING_ROWS, LATENT_ROWS
from inference_service.kernels.support_row import (
    ANY,
    BEFORE_E4M3,
    CLAMPED_EXPERTS,
    CPUS,
    CUTLASS_MOE,
    FLASHINFER,
    FLOATS,
    FP8_CACHE,
    FP8_WEIGHTS,
    GEN,
    GPUS,
    HALVES,
    INPUT_WEIGHTS,
    NO_CUTLASS_MOE,
    NO_E4M3,
    NO_GPU,
    NO_GPU_80,
    NO_HALF,
    NO_TRITON,
    SINKS,
    SOFT_CAP,
    TRITON,
    UNEVEN_EXPERTS,
    UNEVEN_HIDDEN,
    WINDOW,
    Row,
    Setting,
    absent,
    dtype_name,
)

__all__ = [
    "ANY",
    "CLAMPED_EXPERTS",
    "CPUS",
    "FLOATS",
    "FP8_CACHE",
    "FP8_WEIGHTS",
    "INPUT_WEIGHTS",
    "SINKS",
    "SOFT_CAP",
    "TABLE",
    "UNEVEN_EXPERTS",
    "UNEVEN_HIDDEN",
    "WINDOW",
    "Row",
    "Setting",
    "dtype_name",
    "rows",
]


def _tiles(setting: Setting) -> bool:
    """Where the own experts were measured with many tokens too, of which those of uneven sizes have no kernel."""
    uneven = {UNEVEN_HIDDEN, UNEVEN_EXPERTS} & setting.features
    return setting.architecture == "sm_90" and setting.dtype in HALVES and not uneven


def _cache(setting: Setting) -> str:
    """What a cache in FP8 asks for."""
    if FP8_CACHE not in setting.features:
        return ""
    return f"has no caches in FP8 on {setting.architecture}: {NO_E4M3}" if setting.architecture in BEFORE_E4M3 else ""


def _xqa(setting: Setting) -> str:
    if setting.page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {setting.page_size}"
    if setting.head_dim % 16 or setting.head_dim > 256:
        return f"takes a head dim that is a multiple of 16 up to 256, not {setting.head_dim}"
    return f"takes at most 32 query heads a KV head, not {setting.group}" if setting.group > 32 else ""


def _fa2(setting: Setting) -> str:
    if setting.architecture == "sm_75" and setting.dtype == torch.bfloat16:
        return "does not run on sm_75 in bfloat16: its tensor cores have none"
    if FP8_CACHE in setting.features and setting.dtype != torch.bfloat16:
        return "has caches in FP8 beside bfloat16 alone"
    return _heads_of_64(setting)


def _fmha_v2(setting: Setting) -> str:
    if setting.page_size & (setting.page_size - 1) or setting.page_size < 16:
        return f"takes pages of a power of two from 16 tokens up, not {setting.page_size}"
    return _heads_of_64(setting)


def _heads_of_64(setting: Setting) -> str:
    return "" if setting.head_dim in (64, 128, 256) else f"takes a head dim of 64, 128 or 256, not {setting.head_dim}"


def _power_of_two(setting: Setting) -> str:
    even = setting.head_dim >= 32 and setting.head_dim & (setting.head_dim - 1) == 0
    return _cache(setting) if even else f"takes a head dim that is a power of two from 32 up, not {setting.head_dim}"


def _paged(setting: Setting) -> str:
    if setting.head_dim not in (64, 128):
        return f"takes a head dim of 64 or 128, not {setting.head_dim}"
    return f"takes at most 16 query heads a KV head, not {setting.group}" if setting.group > 16 else _cache(setting)


def _fused(backend: str, make: Callable[[], Any]) -> Row:
    """Decodes and chunks in one launch, in steps that run eagerly; other steps are split."""
    return Row(
        "attention_mixed",
        backend,
        make,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_GPU_80,
        otherwise=NO_HALF,
        limit=_heads_of_64,
        lacks=frozenset({WINDOW, SOFT_CAP, SINKS, FP8_CACHE}),
        requires=FLASHINFER,
        graph=False,
    )


TABLE: tuple[Row, ...] = (
    Row(
        "attention_decode",
        "triton",
        attention_mixed.TritonDecode,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        limit=_paged,
        requires=TRITON,
    ),
    Row(
        "attention_decode",
        "xqa",
        flashinfer_xqa.XqaDecode,
        architectures=frozenset({"sm_90", "sm_100", "sm_103", "sm_120", "sm_121"}),
        dtypes=HALVES,
        elsewhere="FlashInfer runs XQA on sm_90, sm_100, sm_103, sm_120 and sm_121",
        otherwise=NO_HALF,
        limit=_xqa,
        lacks=frozenset({WINDOW, SOFT_CAP, SINKS}),
        requires=FLASHINFER,
    ),
    Row(
        "attention_decode",
        "fa2",
        flashinfer_paged.Fa2Decode,
        architectures=GPUS,
        dtypes=HALVES,
        elsewhere=NO_GPU,
        otherwise=NO_HALF,
        limit=_fa2,
        lacks=frozenset({SINKS}),
        requires=FLASHINFER,
        graph=False,
    ),
    Row("attention_decode", "torch", attention_torch.TorchDecode, graph=False),
    Row("attention_decode", "trtllm-gen", absent, architectures=frozenset(), elsewhere=GEN),
    Row(
        "attention_prefill",
        "fa3",
        flashinfer_fa3.Fa3Prefill,
        architectures=frozenset({"sm_90"}),
        dtypes=HALVES,
        elsewhere="FA3 is written for Hopper's instructions, which sm_90 alone has",
        otherwise=NO_HALF,
        limit=_heads_of_64,
        lacks=frozenset({WINDOW, SOFT_CAP, SINKS, FP8_CACHE}),
        requires=FLASHINFER | TRITON,
        graph=False,
    ),
    Row(
        "attention_prefill",
        "fa2",
        flashinfer_paged.Fa2Prefill,
        architectures=GPUS,
        dtypes=HALVES,
        elsewhere=NO_GPU,
        otherwise=NO_HALF,
        limit=_fa2,
        lacks=frozenset({SINKS}),
        requires=FLASHINFER,
        graph=False,
    ),
    Row(
        "attention_prefill",
        "fmha_v2",
        flashinfer_fmha_v2.FmhaV2Prefill,
        architectures=frozenset({"sm_90", "sm_120", "sm_121"}),
        dtypes=HALVES,
        elsewhere="FlashInfer compiles TensorRT-LLM's FMHA v2 for sm_90, sm_120 and sm_121",
        otherwise=NO_HALF,
        limit=_fmha_v2,
        lacks=frozenset({WINDOW, SOFT_CAP, SINKS, FP8_CACHE}),
        requires=FLASHINFER,
        graph=False,
    ),
    Row(
        "attention_prefill",
        "triton",
        attention_mixed.TritonPrefill,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        limit=_paged,
        requires=TRITON,
    ),
    Row("attention_prefill", "torch", attention_torch.TorchPrefill, graph=False),
    Row("attention_prefill", "trtllm-gen", absent, architectures=frozenset(), elsewhere=GEN),
    Row(
        "attention_mixed",
        "triton",
        attention_mixed.TritonPagedAttention,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        limit=_paged,
        requires=TRITON,
    ),
    Row("attention_mixed", "torch", attention_mixed.TorchPagedAttention, graph=False),
    _fused("batch_pod", flashinfer_pod.BatchPod),
    _fused("pod", flashinfer_pod.Pod),
    _fused("batch_attention", flashinfer_pod.HolisticAttention),
    Row(
        "kv_append",
        "triton",
        kv_append.TritonKvAppend,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        limit=_power_of_two,
        requires=TRITON,
    ),
    Row("kv_append", "torch", kv_append.TorchKvAppend, graph=False),
    Row(
        "routing",
        "triton",
        routing.TritonRouting,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        requires=TRITON,
    ),
    Row("routing", "torch", routing.TorchRouting),
    Row(
        "moe",
        "triton+cutlass",
        flashinfer_moe.TritonOrCutlassMoe,
        architectures=CUTLASS_MOE,
        dtypes=HALVES,
        elsewhere=NO_CUTLASS_MOE,
        otherwise=NO_HALF,
        lacks=frozenset({CLAMPED_EXPERTS}),
        requires=FLASHINFER | TRITON,
    ),
    Row(
        "moe",
        "cutlass",
        flashinfer_moe.CutlassMoe,
        architectures=CUTLASS_MOE,
        dtypes=HALVES,
        elsewhere=NO_CUTLASS_MOE,
        otherwise=NO_HALF,
        lacks=frozenset({CLAMPED_EXPERTS}),
        requires=FLASHINFER,
    ),
    Row("moe", "torch", moe.TorchMoe),
    Row(
        "moe",
        "triton",
        flashinfer_moe.TritonMoe,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        lacks=frozenset({CLAMPED_EXPERTS}),
        preferred=_tiles,
        requires=TRITON,
    ),
    Row(
        "gemm",
        "onednn",
        gemm.OneDnnGemm,
        architectures=frozenset({"x86_64"}),
        dtypes=frozenset({torch.float32}),
        elsewhere="packed weights are measured on x86_64 processors alone",
        otherwise="half precision needs AVX-512 or AMX there",
    ),
    Row(
        "gemm",
        "triton+cublas",
        small_gemm.TritonOrCublasGemm,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        requires=FLASHINFER | TRITON,
    ),
    Row(
        "gemm",
        "cublas",
        flashinfer_elementwise.CublasGemm,
        architectures=GPUS,
        dtypes=HALVES,
        elsewhere=NO_GPU,
        otherwise=NO_HALF,
        requires=FLASHINFER,
    ),
    Row(
        "gemm",
        "tinygemm",
        small_gemm.TinyGemm,
        architectures=frozenset({"sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"}),
        dtypes=frozenset({torch.bfloat16}),
        elsewhere="FlashInfer compiles it for GPUs from sm_90 up",
        otherwise="its kernel is for bfloat16",
        requires=FLASHINFER,
    ),
    Row(
        "gemm",
        "cute-dsl",
        small_gemm.CuteDslGemm,
        architectures=frozenset({"sm_100", "sm_103"}),
        dtypes=frozenset({torch.bfloat16}),
        elsewhere="FlashInfer has these kernels for sm_100 and sm_103",
        otherwise="its kernels are for bfloat16",
        requires={"flashinfer": "0.7.4"},
    ),
    Row("gemm", "torch", gemm.TorchGemm),
    Row(
        "norm",
        "flashinfer",
        flashinfer_elementwise.FlashInferNorm,
        architectures=GPUS,
        dtypes=HALVES,
        elsewhere=NO_GPU,
        otherwise=NO_HALF,
        requires=FLASHINFER,
    ),
    Row("norm", "torch", norm.TorchNorm),
    Row(
        "sampling",
        "triton",
        sampling.TritonSampling,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        requires=TRITON,
    ),
    Row(
        "sampling",
        "flashinfer",
        flashinfer_sampling.FlashInferSampling,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        requires=FLASHINFER | TRITON,
    ),
    Row("sampling", "torch", sampling.TorchSampling, graph=False),
    *LATENT_ROWS,
    *GROUPED_ROUTING_ROWS,
    *INPUT_ROUTING_ROWS,
    *FP8_ROWS,
)


def rows(operator: str) -> list[Row]:
    """An operator's backends, the preferred one first."""
    return [row for row in TABLE if row.operator == operator]
