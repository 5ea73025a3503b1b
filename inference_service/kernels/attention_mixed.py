"""Attention of a whole step at once, whatever its rows are, from what the device knows of them: a CUDA graph can hold steps with prefill.

Shapes as in `attention`, and L slots of the page table's width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_service.kernels.attention import StepLayout

POSITIONS_A_PART = 64
"""A context is not split finer."""
MAX_SPLITS = 64


class StepAttention(Protocol):
    """Causal attention of a step. Of the layout it uses positions_T, row_T and pages_RM alone, and padded tokens
    may stand anywhere: one at -1 reads nothing and gets zeros, and one further below gets what its twin at -1 - position gets."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        """What the layers of one step share. `kv_P2HSD` is any layer's cache, for its shape; `heads` are the query's."""
        ...

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any) -> Tensor:
        """The output o_THD, contiguous. Each token sees its row's context up to itself, which is in the cache already. Scores are scaled
        by 1 / sqrt(D)."""
        ...


@dataclass(frozen=True)
class PagedPlan:
    layout: StepLayout
    splits: int


class TritonPagedAttention:
    """One own kernel, and a second where few tokens leave the device so empty that their contexts are split."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_paged

        self._kernels = triton_paged
        # Asked here, since a plan may be traced.
        self._multiprocessors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> PagedPlan:
        programs, positions = layout.positions_T.shape[0] * kv_P2HSD.shape[2], layout.pages_RM.shape[1] * kv_P2HSD.shape[3]
        most = min(2 * self._multiprocessors // programs, -(-positions // POSITIONS_A_PART), MAX_SPLITS)
        return PagedPlan(layout, 1 << max(most, 1).bit_length() - 1)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan) -> Tensor:
        o_THD = torch.empty_like(q_THD)
        self.attend(q_THD, kv_P2HSD, plan, o_THD)
        return o_THD

    def attend(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan, o_THD: Tensor) -> None:
        layout = plan.layout
        self._kernels.attend(q_THD, kv_P2HSD, layout.positions_T, layout.row_T, layout.pages_RM, plan.splits, o_THD)


class TritonDecode:
    """The same kernel for decode rows alone, as `attention.Attention` has it."""

    def __init__(self) -> None:
        self._paged = TritonPagedAttention()

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> PagedPlan:
        rows = layout.decodes
        decodes = replace(layout, positions_T=layout.positions_T[:rows], row_T=layout.row_T[:rows], pages_RM=layout.pages_RM[:rows])
        return self._paged.plan(decodes, kv_P2HSD, heads)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan, o_THD: Tensor) -> None:
        self._paged.attend(q_THD, kv_P2HSD, plan, o_THD)


class TorchPagedAttention:
    """The reference, in plain tensor operations and float32. Gathers a row's pages for each of its tokens."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> StepLayout:
        return layout

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: StepLayout) -> Tensor:
        (tokens, heads, head_dim), (_, _, kv_heads, page_size, _) = q_THD.shape, kv_P2HSD.shape
        length = plan.pages_RM.shape[1] * page_size
        positions_T = torch.where(plan.positions_T < -1, -1 - plan.positions_T, plan.positions_T)
        beyond_TL = torch.arange(length, device=q_THD.device) > positions_T.unsqueeze(1)
        pages_TM = plan.pages_RM[plan.row_T.long()].long().masked_fill(beyond_TL[:, ::page_size], 0)
        kv_T2HLD = kv_P2HSD[pages_TM].permute(0, 2, 3, 1, 4, 5).reshape(tokens, 2, kv_heads, length, head_dim).float()
        # What lies beyond the context may be anything, even NaN.
        k_THLD, v_THLD = kv_T2HLD.masked_fill_(beyond_TL[:, None, None, :, None], 0.0).unbind(1)
        scores_THGL = (q_THD.float() * head_dim**-0.5).view(tokens, kv_heads, -1, head_dim) @ k_THLD.transpose(2, 3)
        weights_THGL = scores_THGL.masked_fill_(beyond_TL[:, None, None, :], float("-inf")).softmax(-1)
        o_THGD: Tensor = weights_THGL.masked_fill_(beyond_TL[:, None, None, :], 0.0) @ v_THLD
        return o_THGD.reshape(tokens, heads, head_dim).to(q_THD.dtype)
