"""The own kernel for attention to latents: what a step's tensors on the device say is all it needs, so that a CUDA graph can hold it.

Shapes as in `mla`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.attention_mixed import PagedPlan, count_splits
from inference_service.kernels.mla import AbsorbedRows, AbsorbedStep


class TritonLatentPaged:
    """All rows of a step, each token for itself."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_mla

        self._kernels = triton_mla
        # Asked here, since a plan may be traced.
        self._multiprocessors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        programs = len(layout.positions_T) * -(-heads // self._kernels.HEADS_A_PROGRAM)
        splits = count_splits(2 * self._multiprocessors // programs, layout.pages_RM.shape[1] * kv_P11SD.shape[3])
        return PagedPlan(layout, splits, spec.scale_for(kv_P11SD.shape[4]), None, None)

    def __call__(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, plan: PagedPlan, o_THL: Tensor) -> None:
        layout = plan.layout
        self._kernels.mla_attend(q_THL, q_THR, kv_P11SD, layout.positions_T, layout.row_T, layout.pages_RM, plan.splits, o_THL, plan.scale)


class TritonLatentDecode(TritonLatentPaged):
    """Decode rows alone."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        rows = layout.decodes
        decodes = replace(layout, positions_T=layout.positions_T[:rows], row_T=layout.row_T[:rows], pages_RM=layout.pages_RM[:rows])
        return super().plan(decodes, kv_P11SD, heads, spec)


class TritonLatentPrefill(TritonLatentPaged):
    """Prefill rows alone. Each token reads its context anew, so that kernels made for prefills go before it."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        # Decode rows are one token each, so that as many tokens as rows are theirs.
        prefills = replace(layout, positions_T=layout.positions_T[layout.decodes :], row_T=layout.row_T[layout.decodes :])
        return super().plan(prefills, kv_P11SD, heads, spec)


def triton_mla_prefill() -> AbsorbedRows:
    """Prefill rows absorbed."""
    return AbsorbedRows(TritonLatentPrefill())


def triton_mla_mixed() -> AbsorbedStep:
    """A whole step absorbed."""
    return AbsorbedStep(TritonLatentPaged())
