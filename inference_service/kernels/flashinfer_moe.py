"""Experts on a GPU: own kernels, and FlashInfer's of CUTLASS.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inference_service.kernels.moe import ClampedSwiglu
from inference_service.kernels.support_row import HALVES

GEMV_SHARE = 1 / 3
"""Up to so many pairs of a token and an expert for each expert, few experts are chosen twice, and to stream them once a pair is faster than
to find the pairs of each (python -m baselines.kernels --operators moe)."""
FEW_TOKENS = 4
"""Up to so many tokens an expert, on average, experts are streamed once for 16 of them. With uniform routing tiles are 1 to 4 % slower up
to 8; but prompts choose alike, and an expert of more than 16 tokens is streamed anew for the next."""
GEMV_TOKENS = 8
"""Up to so many tokens experts that are streamed once a pair alone, for their size, are faster so than by CUTLASS."""


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


class TritonMoe:
    """The own Triton kernels: for a few tokens those that stream each chosen expert once a token, for more once for 16, then tiles."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from inference_service.kernels import triton_grouped, triton_moe, triton_tiled

        self._gemv: Any = triton_moe.moe_gemv
        self._grouped: Any = triton_grouped.moe_grouped
        self._tiled: Any = triton_tiled.moe_tiled
        self._block = triton_grouped.BLOCK

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        assert clamped is None
        if ids_TK.numel() <= GEMV_SHARE * len(down) or not self.groups(down):
            kernels = self._gemv
        else:
            kernels = self._grouped if ids_TK.numel() <= FEW_TOKENS * len(down) else self._tiled
        y_TC: Tensor = kernels(x_TC, gate_up, down, ids_TK, weights_TK, up_first=True)
        return y_TC

    def groups(self, down_ECI: Tensor) -> bool:
        """Whether tokens of an expert can share its weights."""
        _, hidden, size = down_ECI.shape
        return not (hidden % self._block or size % self._block) and down_ECI.dtype in HALVES


class TritonOrCutlassMoe:
    """The own kernels up to FEW_TOKENS, else CUTLASS, by the number of tokens, which the host knows."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        self._few, self._many = TritonMoe(), CutlassMoe()

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        assert clamped is None
        return self.choose(ids_TK, down)(x_TC, gate_up, down, ids_TK, weights_TK)

    def choose(self, ids_TK: Tensor, down_ECI: Tensor) -> TritonMoe | CutlassMoe:
        groups = self._few.groups(down_ECI)
        most = FEW_TOKENS * len(down_ECI) if groups else GEMV_TOKENS * ids_TK.shape[1]
        return self._few if ids_TK.numel() <= most else self._many
