"""A row of the support table: a backend of an operator, where it runs, and the reason where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inference_service.kernels.grouped_routing import GroupedSpec
from inference_service.kernels.mla import LatentShape
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
    """Of flashinfer, triton, cuda and nvcc, as far as they are there."""
    features: frozenset[str] = frozenset()
    """What some layer of the model needs beyond the plain decoder: WINDOW and the like."""
    latent: LatentShape | None = None
    """Of a model whose cache holds latents."""
    grouped: GroupedSpec | None = None
    """How a model's routers choose, where they are DeepSeek's."""


WINDOW, SOFT_CAP, SINKS = "sliding windows", "attention soft caps", "attention sinks"
CLAMPED_EXPERTS = "experts with biases and clamped SwiGLU"
INPUT_WEIGHTS = "routers' weights on the experts' inputs"
FP8_WEIGHTS = "weights in FP8"
FP8_CACHE = "caches in FP8"
UNEVEN_HIDDEN = "hidden sizes that are no multiple of 128"
UNEVEN_EXPERTS = "experts whose sizes are no multiples of 128"


def unlimited(setting: Setting) -> str:
    return ""


def nowhere(setting: Setting) -> bool:
    return False


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
    limit: Callable[[Setting], str] = unlimited
    """Why the model's shape, or a pair of architecture and dtype, is a no; empty where it is not."""
    lacks: frozenset[str] = frozenset()
    """The features of models that it cannot do."""
    preferred: Callable[[Setting], bool] = nowhere
    """Where it goes before the rows above it, since it was measured to be faster."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """The lowest version of each package beyond torch that it was tried with."""
    graph: bool = True
    """Whether a CUDA graph can hold it: what changes from step to step it reads on the device, or plans before each replay; and it leaves
    padded rows alone."""

    def needs(self, architecture: str) -> dict[str, str]:
        """`requires`, and the CUDA version from which FlashInfer compiles for an architecture."""
        cuda = CUDA_OF_FLASHINFER.get(architecture) if "flashinfer" in self.requires else None
        return ({"cuda": cuda} if cuda else {}) | dict(self.requires)

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


def absent() -> Any:
    raise NotImplementedError("the table refuses this backend everywhere")


NO_HALF = "its kernels are for bfloat16 and float16"
NO_GPU = "FlashInfer's kernels run on GPUs from sm_75 up"
NO_GPU_80 = "tried on GPUs from sm_80 up"
NO_TRITON = "Triton compiles for GPUs from sm_80 up"
CUTLASS_MOE = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"})
NO_CUTLASS_MOE = "FlashInfer compiles CUTLASS's fused MoE for GPUs from sm_89 up"
NO_E4M3 = "GPUs convert E4M3 from sm_89 up"
BEFORE_E4M3 = frozenset({"sm_75", "sm_80", "sm_86", "sm_87"})
GEN = "not implemented here; FlashInfer has it for sm_100 and sm_103, as binaries that are downloaded"


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16 and the like, as configurations write it."""
    return str(dtype).removeprefix("torch.")
