"""What is measured: operators, their cases, and the backends that compete for each.

Shapes as in `kernels/`: T tokens, H heads, D head dim, C hidden size, I intermediate size, E experts, K experts a token or inputs,
N outputs, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from inference_service.execution.device import TargetDevice
from inference_service.kernels.support import Row, Setting
from inference_service.models.config import ModelConfig

Call = Callable[[], Any]
"""One launch of an operator; gives its output."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""Relative error in the norm that rounding explains."""
CUDNN = {"flashinfer": "0.6.13", "nvidia-cudnn-frontend": "1.13"}
VLLM = {"vllm": "0.25"}
TENSORRT_LLM = {"tensorrt-llm": "1.0"}
"""What benchmark-only backends need, in the form of `Row.requires`."""
NO_VLLM = "vLLM's kernels are measured on GPUs"
FP8_TOLERANCE = 0.08
"""The same where weights and inputs are rounded to 8 bits in blocks."""


@dataclass(frozen=True)
class Grid:
    """The sizes that are run, in tokens and requests."""

    batches: tuple[int, ...] = (1, 8, 32, 128, 256)
    """Decode rows."""
    contexts: tuple[int, ...] = (1024, 4096)
    long_contexts: tuple[int, ...] = (16384,)
    """At batches up to 8 alone."""
    shared_batches: tuple[int, ...] = (32, 128)
    """Decode rows that share their contexts' beginning."""
    few_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 128, 256)
    """Of products and experts in steps of decodes."""
    fp8_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048, 8192)
    """Of products in FP8: for each DeepGEMM compiles some seconds."""
    prefills: tuple[int, ...] = (512, 2048, 8192)
    prefill_batches: tuple[int, ...] = (1, 4)
    chunks: tuple[int, ...] = (256, 512, 2048)
    """Prompt tokens of a mixed step."""
    mixed_decodes: tuple[int, ...] = (8, 32, 128)
    mixed_contexts: tuple[int, ...] = (512, 2048, 8192)
    """Of its decodes; the chunk is the end of as long a context, or a whole one where it is longer."""


SMALL = Grid((1, 8), (256,), (), (4,), (1, 8), (8,), (128,), (1,), (64,), (4,), (32, 128))
"""For a CPU."""


@dataclass(frozen=True)
class Bench:
    """The model's shape and the machine that it is measured on."""

    shape: ModelConfig
    target: TargetDevice
    setting: Setting
    grid: Grid

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.setting.dtype

    def normal(self, *sizes: int) -> Tensor:
        """Standard normal values of the bench's dtype."""
        return torch.randn(sizes, dtype=self.dtype, device=self.device)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@dataclass(frozen=True)
class Case:
    """An operator at one size."""

    kind: str
    """decode, prefill, mixed and the like; of products the weight's name."""
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.kind}: {', '.join(f'{name} {size}' for name, size in self.sizes.items())}"


@dataclass(frozen=True)
class Work:
    """What one call cannot do without, whichever backend computes it: operations, and bytes read or written once."""

    flops: float
    bytes: float
    precision: str
    """Of the products, as `limits` names it."""


def _all(case: Case) -> str:
    return ""


def up_to(most: int) -> Callable[[Case], str]:
    """The limit of a backend that is for few tokens."""

    def limit(case: Case) -> str:
        return "" if case.sizes["tokens"] <= most else f"is made for few tokens; not run beyond {most}"

    return limit


def absent() -> Any:
    """What makes a backend that its row refuses everywhere."""
    raise NotImplementedError


@dataclass(frozen=True)
class Backend:
    """A row of a support table, and how its operator is called."""

    row: Row
    prepare: Callable[[Any, list[Any], Bench], list[Call]]
    """From what the row makes, and the copies of a case's inputs: a call for each."""
    limit: Callable[[Case], str] = _all
    """Why it does not do a case; empty where it does."""
    tolerance: float | None = None
    """Of the relative error, where it is not the dtype's."""
    capturable: bool = True
    """Whether a CUDA graph holds all of it: it never waits for the device, and has nothing on a stream of its own."""
    note: str = ""
    """What it does otherwise than the others."""

    @property
    def name(self) -> str:
        return self.row.backend


class Operator(ABC):
    """One operator: its cases, inputs, reference and backends."""

    name: ClassVar[str]
    unit: ClassVar[str] = "relative error"
    """Of what the reference is compared by."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @abstractmethod
    def cases(self) -> list[Case]:
        """None where the model has no such operator."""

    @abstractmethod
    def work(self, case: Case) -> Work: ...

    @abstractmethod
    def make(self, case: Case, copies: int) -> list[Any]:
        """So many inputs, each in memory of its own as far as a call streams it."""

    @abstractmethod
    def backends(self) -> list[Backend]: ...

    @abstractmethod
    def reference(self, inputs: Any) -> Tensor:
        """The output in float32, in plain PyTorch."""

    def fresh(self, copies: list[Any]) -> list[Any]:
        """The inputs as they were made, whatever an earlier backend did to them."""
        return copies

    def outcome(self, inputs: Any, output: Any) -> Tensor:
        """What of a call's output, or of what it wrote to, is compared with the reference."""
        result: Tensor = torch.cat(output) if isinstance(output, tuple) else output
        return result

    def error(self, inputs: Any, output: Any, expected: Tensor) -> float:
        """How far an output is from the reference."""
        outcome = self.outcome(inputs, output).float()
        return float((outcome - expected).norm() / expected.norm())
