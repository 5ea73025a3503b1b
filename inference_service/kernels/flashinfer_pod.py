"""Attention of a step with decodes and prefill chunks in one launch, by FlashInfer: POD, whose blocks do a part of both, or BatchAttention,
a persistent kernel for rows of any length. Both are planned on the host once a step, so that no CUDA graph can hold them.

Shapes as in `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from inference_service.kernels.attention import AttentionSpec, FusedAttention, StepLayout
from inference_service.kernels.flashinfer_paged import WrapperRing, flat_pages, pinned, split_bytes


@dataclass(frozen=True)
class Rows:
    """Some rows of a step as FlashInfer's plans take them: int32, on the host but for `pages`."""

    starts: Tensor
    page_starts: Tensor
    pages: Tensor
    last_page_lengths: Tensor
    contexts: Tensor


def describe_rows(layout: StepLayout, rows: slice, page_size: int) -> Rows:
    device, lengths, contexts = layout.pages_RM.device, layout.lengths[rows], layout.contexts[rows]
    pages = [-(-context // page_size) for context in contexts]
    return Rows(
        pinned([0, *accumulate(lengths)], device),
        pinned([0, *accumulate(pages)], device),
        flat_pages(layout.pages_RM[rows], pages),
        pinned([(context - 1) % page_size + 1 for context in contexts], device),
        pinned(contexts, device),
    )


@dataclass(frozen=True)
class FusedPlan:
    decodes: int
    wrapper: int
    scale: float
    chunk_pages_M: Tensor | None = None
    chunk_context: int = 0


class BatchPod(FusedAttention):
    """`flashinfer.pod.BatchPODWithPagedKVCacheWrapper`: any number of chunks."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_pod_ops

        self._ops: Any = flashinfer_pod_ops
        self._ring = WrapperRing(flashinfer_pod_ops.make_batch_pod_wrapper)

    def _plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec) -> FusedPlan:
        page_size = kv_P2HSD.shape[3]
        decodes = describe_rows(layout, slice(0, layout.decodes), page_size)
        chunks = describe_rows(layout, slice(layout.decodes, None), page_size)
        # FlashInfer halves it, for the chunks and for the decodes.
        wrapper, copied = self._ring.next(kv_P2HSD.device, spec, 2 * split_bytes(kv_P2HSD, heads))
        self._ops.plan_batch_pod(wrapper, chunks, decodes, heads, kv_P2HSD, spec)
        copied.record()
        return FusedPlan(layout.decodes, wrapper, spec.scale_for(kv_P2HSD.shape[4]))

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: FusedPlan, sinks_H: Tensor | None = None) -> Tensor:
        o_THD: Tensor = self._ops.batch_pod(q_THD, kv_P2HSD, plan.wrapper, plan.decodes)
        return o_THD


class Pod(FusedAttention):
    """`flashinfer.pod.PODWithPagedKVCacheWrapper`: one chunk, a prompt's first, whose keys and values are gathered from their pages."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_pod_ops

        self._ops: Any = flashinfer_pod_ops
        self._ring = WrapperRing(flashinfer_pod_ops.make_pod_wrapper)

    def serves(self, layout: StepLayout) -> bool:
        decodes = layout.decodes
        return super().serves(layout) and layout.lengths[decodes:] == layout.contexts[decodes:] and len(layout.lengths) == decodes + 1

    def _plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec) -> FusedPlan:
        page_size, decodes = kv_P2HSD.shape[3], layout.decodes
        wrapper, copied = self._ring.next(kv_P2HSD.device, spec, split_bytes(kv_P2HSD, heads))
        self._ops.plan_pod(wrapper, describe_rows(layout, slice(0, decodes), page_size), heads, kv_P2HSD, spec)
        copied.record()
        context = layout.contexts[decodes]
        pages_M = layout.pages_RM[decodes, : -(-context // page_size)].long()
        return FusedPlan(decodes, wrapper, spec.scale_for(kv_P2HSD.shape[4]), pages_M, context)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: FusedPlan, sinks_H: Tensor | None = None) -> Tensor:
        assert plan.chunk_pages_M is not None
        kv_M2HSD = kv_P2HSD.index_select(0, plan.chunk_pages_M)
        kv_2LHD = kv_M2HSD.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : plan.chunk_context].contiguous()
        o_THD: Tensor = self._ops.pod(q_THD, kv_2LHD, kv_P2HSD, plan.wrapper, plan.decodes, plan.scale)
        return o_THD


def is_compiled(backend: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether POD, or batch POD, can run here without minutes of compiling first."""
    from inference_service.kernels import flashinfer_pod_ops

    return flashinfer_pod_ops.is_compiled(backend, dtype, head_dim)


def find_obstacle(backend: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why `prebuild` does not time POD or batch POD; empty where it does. Of what is not compiled yet it compiles batch POD alone."""
    from inference_service.kernels import flashinfer_pod_ops

    if is_compiled(backend, dtype, head_dim):
        return ""
    if backend == "pod":
        return "FlashInfer compiles it for more than 8 minutes on 16 cores; a start with kernels.attention_mixed: pod does that"
    return "" if flashinfer_pod_ops.has_compiler() else "it is not compiled, and here is no nvcc"


class HolisticAttention(FusedAttention):
    """`flashinfer.attention.BatchAttention`, whose plan waits for the device: for comparison, not for speed."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_pod_ops

        self._ops: Any = flashinfer_pod_ops
        self._ring = WrapperRing(lambda workspace: flashinfer_pod_ops.make_batch_attention())

    def _plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec) -> FusedPlan:
        wrapper, copied = self._ring.next(kv_P2HSD.device, spec, 0)
        self._ops.plan_batch_attention(wrapper, describe_rows(layout, slice(None), kv_P2HSD.shape[3]), heads, kv_P2HSD, spec)
        copied.record()
        return FusedPlan(layout.decodes, wrapper, spec.scale_for(kv_P2HSD.shape[4]))

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: FusedPlan, sinks_H: Tensor | None = None) -> Tensor:
        o_THD = torch.empty_like(q_THD)
        self._ops.batch_attention(q_THD, kv_P2HSD, plan.wrapper, o_THD)
        return o_THD
