"""Decode attention by XQA, TensorRT-LLM's kernel in FlashInfer: block tables and lengths are read on the device, and nothing is planned.

Shapes as in `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout

WORKSPACE_BYTES = 64 << 20
"""8 MiB of semaphores, and partial outputs of at most some CTAs a multiprocessor."""


@dataclass(frozen=True)
class XqaPlan:
    """What the kernel reads; int32, contiguous. Its grid follows from the table's width, which is the host's."""

    pages_BM: Tensor
    contexts_B: Tensor
    max_context: int
    scale: float


class XqaDecode:
    """One launch a layer. A context of 0 is not allowed."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops
        # Zero at first use; the kernel leaves its semaphores at zero.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> XqaPlan:
        assert spec.window is None and spec.soft_cap is None
        pages_BM = layout.pages_RM[: layout.decodes].to(torch.int32).contiguous()
        contexts_B = layout.contexts_R[: layout.decodes].to(torch.int32)
        return XqaPlan(pages_BM, contexts_B, pages_BM.shape[1] * kv_P2HSD.shape[3], spec.scale_for(kv_P2HSD.shape[4]))

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: XqaPlan, o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        assert sinks_H is None and q_THD.is_contiguous() and o_THD.is_contiguous()
        self._ops.xqa(q_THD, kv_P2HSD, plan.pages_BM, plan.contexts_B, plan.max_context, plan.scale, o_THD, self._workspace)
