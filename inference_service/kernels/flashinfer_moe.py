"""Experts on a GPU: FlashInfer's CUTLASS kernels for many tokens, own matrix-vector kernels for a few.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inference_service.kernels.moe import ClampedSwiglu

TUNE_MAX_TOKENS = 8192
"""The largest batch that is tuned for; larger ones run as this one does. FlashInfer keeps the first value of a process for good."""
GEMV_TOKENS = 8
"""Up to so many tokens the matrix-vector kernels are faster than CUTLASS (benchmarks/moe_small.py)."""


class CutlassMoe:
    """`flashinfer.fused_moe.cutlass_fused_moe`. Its last step adds atomically: the last bits differ from run to run."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from flashinfer.fused_moe import cutlass_fused_moe

        self._fused_moe: Any = cutlass_fused_moe

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        assert clamped is None
        y_TC = torch.empty_like(x_TC)
        self._fused_moe(
            x_TC,
            ids_TK,
            weights_TK,
            gate_up,
            down,
            x_TC.dtype,
            quant_scales=None,
            output=y_TC,
            tune_max_num_tokens=TUNE_MAX_TOKENS,
        )
        return y_TC


class GemvMoe:
    """The own Triton kernels, which stream each chosen expert once a token: for a few tokens."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from inference_service.kernels import triton_moe

        self._gemv: Any = triton_moe.moe_gemv

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        assert clamped is None
        y_TC: Tensor = self._gemv(x_TC, gate_up, down, ids_TK, weights_TK, up_first=True)
        return y_TC


class GemvOrCutlassMoe:
    """The one or the other by the number of tokens, which the host knows."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        self._few, self._many = GemvMoe(), CutlassMoe()

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        assert clamped is None
        moe = self._few if len(x_TC) <= GEMV_TOKENS else self._many
        return moe(x_TC, gate_up, down, ids_TK, weights_TK)


@contextmanager
def autotune(file: Path, tune: bool = True) -> Iterator[None]:
    """FlashInfer's tactics for what runs inside: from `file`, and measured where it lacks them (`tune`), then kept there.

    One call of a kernel tunes it for all batch sizes. Outside of this context what is loaded stays in use. A file of another GPU or other
    versions of FlashInfer, CUDA, cuBLAS or cuDNN is ignored with a warning, and left as it is: name it by these.
    """
    import flashinfer

    with flashinfer.autotune(tune, cache=str(file)):
        yield
