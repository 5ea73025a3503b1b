"""The support table: which backend of which operator runs on which architecture, in which dtype, and why not elsewhere.

A capability is looked up here, never found out by trying. Rows of an operator stand in the order of preference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from inference_service.kernels import attention, gemm, moe, norm, rope, sampling

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
GPUS = frozenset({"sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"})
CPUS = frozenset({"x86_64", "aarch64", "arm64"})
ANY = GPUS | CPUS


@dataclass(frozen=True)
class Row:
    """One backend of one operator."""

    operator: str
    backend: str
    make: type[Any]
    """The class that implements the operator's protocol; made without arguments."""
    architectures: frozenset[str] = ANY
    dtypes: frozenset[torch.dtype] = FLOATS
    elsewhere: str = ""
    """Why other architectures are a no."""
    otherwise: str = ""
    """Why other dtypes are a no."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """The lowest version of each package beyond torch that has it."""

    def refusal(self, architecture: str, dtype: torch.dtype) -> str:
        """Why it cannot run there; empty where it can."""
        if architecture not in self.architectures:
            return f"{self.operator} by {self.backend} does not run on {architecture}: {self.elsewhere or 'untried'}"
        if dtype not in self.dtypes:
            return f"{self.operator} by {self.backend} does not run in {dtype_name(dtype)}: {self.otherwise or 'untried'}"
        return ""


TABLE: tuple[Row, ...] = (
    Row("attention", "torch", attention.TorchAttention),
    Row("moe", "torch", moe.TorchMoe),
    Row(
        "gemm",
        "onednn",
        gemm.OneDnnGemm,
        architectures=frozenset({"x86_64"}),
        dtypes=frozenset({torch.float32}),
        elsewhere="packed weights are measured on x86_64 processors alone",
        otherwise="half precision needs AVX-512 or AMX there",
    ),
    Row("gemm", "torch", gemm.TorchGemm),
    Row("norm", "torch", norm.TorchNorm),
    Row("rope", "torch", rope.TorchRope),
    Row("sampling", "torch", sampling.TorchSampling),
)


def rows(operator: str) -> list[Row]:
    """An operator's backends, the preferred one first."""
    return [row for row in TABLE if row.operator == operator]


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16 and the like, as configurations write it."""
    return str(dtype).removeprefix("torch.")
