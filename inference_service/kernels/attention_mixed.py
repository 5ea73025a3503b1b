"""Attention of a whole step at once, whatever its rows are, from what the device knows of them: a CUDA graph can hold steps with prefill.

Shapes as in `attention`, and L slots of the page table's width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.attention_torch import soft_capped, softmax
from inference_service.kernels.fp8 import as_bytes

POSITIONS_A_PART = 64
"""A context is not split finer."""
MAX_SPLITS = 64


class StepAttention(Protocol):
    """Causal attention of a step. Of the layout it uses positions_T, row_T and pages_RM alone, and padded tokens
    may stand anywhere: one at -1 reads nothing and gets zeros, and one further below gets what its twin at -1 - position gets."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        """What the layers of one step share that attend by one `spec`. `kv_P2HSD` is any layer's cache, for its shape; `heads` are the
        query's."""
        ...

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, sinks_H: Tensor | None = None) -> Tensor:
        """The output o_THD, contiguous. Context, window and sinks are as in `attention.Attention`."""
        ...


@dataclass(frozen=True)
class PagedPlan:
    layout: StepLayout
    splits: int
    scale: float
    soft_cap: float | None
    window: int | None


def count_splits(room: int, positions: int) -> int:
    """Into how many parts to split contexts, where the device has room for so many a program: a power of two."""
    most = min(room, -(-positions // POSITIONS_A_PART), MAX_SPLITS)
    return 1 << max(most, 1).bit_length() - 1


class TritonPagedAttention:
    """One own kernel, and a second where few tokens leave the device so empty that their contexts are split."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_paged

        self._kernels = triton_paged
        # Asked here, since a plan may be traced.
        self._multiprocessors = torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        programs, positions = layout.positions_T.shape[0] * kv_P2HSD.shape[2], layout.pages_RM.shape[1] * kv_P2HSD.shape[3]
        splits = count_splits(2 * self._multiprocessors // programs, min(positions, spec.window or positions))
        return PagedPlan(layout, splits, spec.scale_for(kv_P2HSD.shape[4]), spec.soft_cap, spec.window)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan, sinks_H: Tensor | None = None) -> Tensor:
        o_THD = torch.empty_like(q_THD)
        self.attend(q_THD, kv_P2HSD, plan, o_THD, sinks_H)
        return o_THD

    def attend(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan, o_THD: Tensor, sinks_H: Tensor | None) -> None:
        layout = plan.layout
        self._kernels.attend(
            q_THD,
            kv_P2HSD,
            layout.positions_T,
            layout.row_T,
            layout.pages_RM,
            plan.splits,
            o_THD,
            plan.scale,
            plan.soft_cap,
            plan.window,
            sinks_H,
        )


class TritonDecode:
    """The same kernel for decode rows alone, as `attention.Attention` has it."""

    def __init__(self) -> None:
        self._paged = TritonPagedAttention()

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        rows = layout.decodes
        decodes = replace(layout, positions_T=layout.positions_T[:rows], row_T=layout.row_T[:rows], pages_RM=layout.pages_RM[:rows])
        return self._paged.plan(decodes, kv_P2HSD, heads, spec)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan, o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        self._paged.attend(q_THD, kv_P2HSD, plan, o_THD, sinks_H)


class TritonPrefill(TritonDecode):
    """The same kernel for prefill rows alone. Each token reads its context anew, so that kernels made for prefills go before it."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        # Decode rows are one token each, so that as many tokens as rows are theirs.
        prefills = replace(layout, positions_T=layout.positions_T[layout.decodes :], row_T=layout.row_T[layout.decodes :])
        return self._paged.plan(prefills, kv_P2HSD, heads, spec)


class TorchPagedAttention:
    """The reference, in plain tensor operations and float32. Gathers a row's pages for each of its tokens."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan:
        return PagedPlan(layout, 1, spec.scale_for(kv_P2HSD.shape[4]), spec.soft_cap, spec.window)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: PagedPlan, sinks_H: Tensor | None = None) -> Tensor:
        layout = plan.layout
        (tokens, heads, head_dim), (_, parts, kv_heads, page_size, _) = q_THD.shape, kv_P2HSD.shape
        length = layout.pages_RM.shape[1] * page_size
        positions_T1 = torch.where(layout.positions_T < -1, -1 - layout.positions_T, layout.positions_T).unsqueeze(1)
        position_L = torch.arange(length, device=q_THD.device)
        beyond_TL = position_L > positions_T1
        hidden_TL = beyond_TL if plan.window is None else beyond_TL | (position_L <= positions_T1 - plan.window)
        pages_TM = layout.pages_RM[layout.row_T.long()].long().masked_fill(beyond_TL[:, ::page_size], 0)
        kv_TM2HSD = as_bytes(kv_P2HSD)[pages_TM].view(kv_P2HSD.dtype)
        kv_T2HLD = kv_TM2HSD.permute(0, 2, 3, 1, 4, 5).reshape(tokens, parts, kv_heads, length, head_dim).float()
        # What lies beyond the context may be anything, even NaN.
        kv_T2HLD.masked_fill_(beyond_TL[:, None, None, :, None], 0.0)
        k_THLD, v_THLD = kv_T2HLD[:, 0], kv_T2HLD[:, -1]
        q_THGD = (q_THD.float() * plan.scale).view(tokens, kv_heads, -1, head_dim)
        scores_THGL = soft_capped(q_THGD @ k_THLD.transpose(2, 3), plan.soft_cap)
        scores_THGL.masked_fill_(hidden_TL[:, None, None, :], float("-inf"))
        sinks_THG1 = None if sinks_H is None else sinks_H.view(kv_heads, -1, 1).expand(tokens, -1, -1, -1)
        weights_THGL = softmax(scores_THGL, sinks_THG1).masked_fill(hidden_TL[:, None, None, :], 0.0)
        return (weights_THGL @ v_THLD).reshape(tokens, heads, head_dim).to(q_THD.dtype)
