"""Experts on a GPU: FlashInfer's CUTLASS kernels for many tokens, own matrix-vector kernels for a few.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inference_service.kernels.moe import ClampedSwiglu

GEMV_TOKENS = 8
"""Up to so many tokens the matrix-vector kernels are faster than CUTLASS (python -m baselines.kernels --operators moe)."""


class CutlassMoe:
    """`flashinfer.fused_moe.cutlass_fused_moe`. Its last step adds atomically: the last bits differ from run to run."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops
        from inference_service.kernels.expert_tactics import expert_tactics

        expert_tactics()
        self._ops = flashinfer_ops

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        assert clamped is None
        return self._ops.cutlass_moe(x_TC, gate_up, down, ids_TK, weights_TK)


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
