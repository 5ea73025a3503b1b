"""From the projections of MLA to what attention reads: rotate queries, norm latents, rotate their keys, and write both into their pages.

Shapes as in `mla`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import StepLayout
from inference_service.kernels.rope import rotate, rotations


class MlaAppend(Protocol):
    """Rotates and appends. A token at position -1 appends nothing."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, table_PR: Tensor) -> Any:
        """What the layers of one step share. `table_PR` holds for each position the cosines of the R/2 angles, then their sines, in
        float32."""
        ...

    def __call__(self, q_THQ: Tensor, kv_TD: Tensor, norm_L: Tensor, eps: float, kv_P11SD: Tensor, plan: Any) -> None:
        """Rotate the last R of each query head in place, and append the latents of `kv_TD`, RMS-normed, with their rotated keys. Both may
        be views of one product; `kv_TD` may be overwritten."""
        ...


@dataclass(frozen=True)
class TorchMlaAppendPlan:
    """Computed once a step."""

    rotations: Tensor
    slot_T: Tensor
    """Of the whole cache."""


class TorchMlaAppend:
    """Plain tensor operations. Knows no padded rows: every position counts."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, table_PR: Tensor) -> TorchMlaAppendPlan:
        page_size = kv_P11SD.shape[3]
        page_T = layout.pages_RM[layout.row_T, layout.positions_T // page_size]
        slot_T = page_T.long() * page_size + layout.positions_T % page_size
        return TorchMlaAppendPlan(rotations(table_PR, layout.positions_T, kv_P11SD.dtype), slot_T)

    def __call__(self, q_THQ: Tensor, kv_TD: Tensor, norm_L: Tensor, eps: float, kv_P11SD: Tensor, plan: TorchMlaAppendPlan) -> None:
        latent_TL, key_TR = kv_TD.tensor_split((len(norm_L),), dim=-1)
        rotate(q_THQ[..., -key_TR.shape[1] :], plan.rotations)
        rotate(key_TR.unsqueeze(1), plan.rotations)
        latent_TL = F.rms_norm(latent_TL, norm_L.shape, norm_L, eps)
        kv_P11SD.view(-1, kv_TD.shape[1]).index_copy_(0, plan.slot_T, torch.cat((latent_TL, key_TR), dim=-1))


class TritonMlaAppend:
    """One launch a layer, and nothing before it."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_mla_append

        self._kernels = triton_mla_append

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, table_PR: Tensor) -> tuple[Tensor, ...]:
        return table_PR, layout.positions_T, layout.row_T, layout.pages_RM

    def __call__(self, q_THQ: Tensor, kv_TD: Tensor, norm_L: Tensor, eps: float, kv_P11SD: Tensor, plan: tuple[Tensor, ...]) -> None:
        self._kernels.mla_append(q_THQ, kv_TD, norm_L, eps, kv_P11SD, *plan)
