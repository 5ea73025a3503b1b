"""The support table: which backend of which operator runs on which architecture, in which dtype, and why not elsewhere.

A capability is looked up here, never found out by trying. Rows of an operator stand in the order of preference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inference_service.kernels import (
    attention_mixed,
    attention_torch,
    flashinfer_elementwise,
    flashinfer_fmha_v2,
    flashinfer_moe,
    flashinfer_paged,
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
from inference_service.kernels.versions import CUDA_OF_FLASHINFER, at_least

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALVES = frozenset({torch.bfloat16, torch.float16})
GPUS = frozenset({"sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"})
CPUS = frozenset({"x86_64", "aarch64", "arm64"})
ANY = GPUS | CPUS
FLASHINFER = {"flashinfer": "0.6.13"}
TRITON = {"triton": "3.6"}


@dataclass(frozen=True)
class Setting:
    """Where a backend would run, and for which model."""

    architecture: str
    dtype: torch.dtype
    head_dim: int
    group: int
    """Query heads that share a KV head."""
    page_size: int
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of flashinfer, triton and cuda, as far as they are there."""
    features: frozenset[str] = frozenset()
    """What some layer of the model needs beyond the plain decoder: WINDOW and the like."""


WINDOW, SOFT_CAP, SINKS = "sliding windows", "attention soft caps", "attention sinks"
CLAMPED_EXPERTS = "experts with biases and clamped SwiGLU"


def _unlimited(setting: Setting) -> str:
    return ""


@dataclass(frozen=True)
class Row:
    """One backend of one operator."""

    operator: str
    backend: str
    make: Callable[[], Any]
    """Gives what implements the operator's protocol."""
    architectures: frozenset[str] = ANY
    dtypes: frozenset[torch.dtype] = FLOATS
    elsewhere: str = ""
    """Why other architectures are a no."""
    otherwise: str = ""
    """Why other dtypes are a no."""
    limit: Callable[[Setting], str] = _unlimited
    """Why the model's shape, or a pair of architecture and dtype, is a no; empty where it is not."""
    lacks: frozenset[str] = frozenset()
    """The features of models that it cannot do."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """The lowest version of each package beyond torch that it was tried with."""
    graph: bool = True
    """Whether a CUDA graph can hold it: it reads what changes from step to step on the device, and leaves padded rows alone."""

    def needs(self, architecture: str) -> dict[str, str]:
        """`requires`, and the CUDA version from which FlashInfer compiles for an architecture."""
        cuda = CUDA_OF_FLASHINFER.get(architecture) if "flashinfer" in self.requires else None
        return dict(self.requires) | ({"cuda": cuda} if cuda else {})

    def refusal(self, setting: Setting) -> str:
        """Why it cannot run there; empty where it can."""
        name, where = f"{self.operator} by {self.backend}", setting.architecture
        if where not in self.architectures:
            return f"{name} does not run on {where}: {self.elsewhere or 'untried'}"
        if setting.dtype not in self.dtypes:
            return f"{name} does not run in {dtype_name(setting.dtype)}: {self.otherwise or 'untried'}"
        if lacking := sorted(self.lacks & setting.features):
            return f"{name} has no {', no '.join(lacking)}"
        if limit := self.limit(setting):
            return f"{name} {limit}"
        for package, lowest in self.needs(where).items():
            found = setting.versions.get(package)
            if found is None or not at_least(found, lowest):
                return f"{name} needs {package} {lowest} or newer{f', not {found}' if found else ', which is not there'}"
        return ""


def _xqa(setting: Setting) -> str:
    if setting.page_size not in (16, 32, 64, 128):
        return f"takes pages of 16, 32, 64 or 128 tokens, not {setting.page_size}"
    if setting.head_dim % 16 or setting.head_dim > 256:
        return f"takes a head dim that is a multiple of 16 up to 256, not {setting.head_dim}"
    return f"takes at most 32 query heads a KV head, not {setting.group}" if setting.group > 32 else ""


def _fa2(setting: Setting) -> str:
    if setting.architecture == "sm_75" and setting.dtype == torch.bfloat16:
        return "does not run on sm_75 in bfloat16: its tensor cores have none"
    return _heads_of_64(setting)


def _fmha_v2(setting: Setting) -> str:
    if setting.page_size & (setting.page_size - 1) or setting.page_size < 16:
        return f"takes pages of a power of two from 16 tokens up, not {setting.page_size}"
    return _heads_of_64(setting)


def _heads_of_64(setting: Setting) -> str:
    return "" if setting.head_dim in (64, 128, 256) else f"takes a head dim of 64, 128 or 256, not {setting.head_dim}"


def _power_of_two(setting: Setting) -> str:
    even = setting.head_dim >= 32 and setting.head_dim & (setting.head_dim - 1) == 0
    return "" if even else f"takes a head dim that is a power of two from 32 up, not {setting.head_dim}"


def _paged(setting: Setting) -> str:
    if setting.head_dim not in (64, 128):
        return f"takes a head dim of 64 or 128, not {setting.head_dim}"
    return f"takes at most 16 query heads a KV head, not {setting.group}" if setting.group > 16 else ""


def _absent() -> Any:
    raise NotImplementedError("the table refuses this backend everywhere")


NO_HALF = "its kernels are for bfloat16 and float16"
NO_GPU = "FlashInfer's kernels run on GPUs from sm_75 up"
NO_TRITON = "Triton compiles for GPUs from sm_80 up"
CUTLASS_MOE = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"})
NO_CUTLASS_MOE = "FlashInfer compiles CUTLASS's fused MoE for GPUs from sm_89 up"
GEN = "not implemented here; FlashInfer has it for sm_100 and sm_103, as binaries that are downloaded"

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
    Row("attention_decode", "trtllm-gen", _absent, architectures=frozenset(), elsewhere=GEN),
    Row(
        "attention_prefill",
        "fa3",
        flashinfer_paged.Fa3Prefill,
        architectures=frozenset({"sm_90"}),
        dtypes=HALVES,
        elsewhere="FA3 is written for Hopper's instructions, which sm_90 alone has",
        otherwise=NO_HALF,
        limit=_heads_of_64,
        lacks=frozenset({WINDOW, SOFT_CAP, SINKS}),
        requires=FLASHINFER,
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
        lacks=frozenset({WINDOW, SOFT_CAP, SINKS}),
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
    Row("attention_prefill", "trtllm-gen", _absent, architectures=frozenset(), elsewhere=GEN),
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
        flashinfer_moe.GemvOrCutlassMoe,
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
        flashinfer_moe.GemvMoe,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        lacks=frozenset({CLAMPED_EXPERTS}),
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
        small_gemm.GemvOrCublasGemm,
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
)


def rows(operator: str) -> list[Row]:
    """An operator's backends, the preferred one first."""
    return [row for row in TABLE if row.operator == operator]


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16 and the like, as configurations write it."""
    return str(dtype).removeprefix("torch.")
