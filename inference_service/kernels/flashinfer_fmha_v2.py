"""Prefill attention by TensorRT-LLM's FMHA v2 in FlashInfer: block tables are read on the device, and nothing is planned.

Shapes as in `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.flashinfer_paged import upload

WORKSPACE_BYTES = 16 << 20
"""A tile counter; the rest is for kernels that are not compiled here."""


@dataclass(frozen=True)
class FmhaPlan:
    """What the kernel reads; int32, contiguous. The numbers are the host's."""

    pages_RM: Tensor
    contexts_R: Tensor
    starts_q: Tensor
    """Each row's first token, and the end of all: R + 1."""
    starts_kv: Tensor
    max_length: int
    max_context: int
    scale: float


class FmhaV2Prefill:
    """One launch a layer; chunks may be shorter than their contexts."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> FmhaPlan:
        assert spec.window is None and spec.soft_cap is None
        lengths, contexts = layout.lengths[layout.decodes :], layout.contexts[layout.decodes :]
        starts_q, starts_kv = upload([0, *accumulate(lengths), 0, *accumulate(contexts)], kv_P2HSD.device).chunk(2)
        return FmhaPlan(
            layout.pages_RM[layout.decodes :].to(torch.int32).contiguous(),
            layout.contexts_R[layout.decodes :].to(torch.int32),
            starts_q,
            starts_kv,
            max(lengths),
            max(contexts),
            spec.scale_for(kv_P2HSD.shape[4]),
        )

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: FmhaPlan, o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        # The kernel knows no strides.
        assert sinks_H is None and q_THD.is_contiguous() and kv_P2HSD.is_contiguous() and o_THD.is_contiguous()
        self._ops.fmha_v2(
            q_THD,
            kv_P2HSD,
            plan.pages_RM,
            plan.contexts_R,
            plan.starts_q,
            plan.starts_kv,
            plan.max_length,
            plan.max_context,
            plan.scale,
            o_THD,
            self._workspace,
        )
