"""Attention backends that are measured and not served, each as `Attention` or `StepAttention` of the service has it.

To be made where their packages are. Shapes as in `kernels.attention`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.flashinfer_paged import Fa2Decode
from inference_service.kernels.flashinfer_xqa import XqaDecode, XqaPlan

FAR = 16384
"""The tokens that a grid is made for which must do for any context, as a captured one must."""


class XqaFar(XqaDecode):
    """XQA that is told the longest context that may come."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> XqaPlan:
        missing = max(0, FAR // kv_P2HSD.shape[3] - layout.pages_RM.shape[1])
        return super().plan(replace(layout, pages_RM=F.pad(layout.pages_RM, (0, missing))), kv_P2HSD, heads, spec)


class Fa3Decode(Fa2Decode):
    """FA3's prefill kernel, used for decodes."""

    backend = "fa3"


class Pages:
    """Some rows' pages in the forms that FlashInfer's wrappers take: int32, on the layout's device."""

    def __init__(self, layout: StepLayout, rows: slice, page_size: int, skip: int = 0) -> None:
        """`skip`: how many pages of each row are left out, from its beginning."""
        device = layout.pages_RM.device
        lengths, contexts = layout.lengths[rows], layout.contexts[rows]
        counts = [-(-context // page_size) - skip for context in contexts]

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.starts = ints([0, *accumulate(lengths)])
        self.page_starts = ints([0, *accumulate(counts)])
        tables = layout.pages_RM[rows].unbind()
        self.pages = torch.cat([table[skip : skip + count] for table, count in zip(tables, counts, strict=True)]).int()
        self.last = ints([(context - 1) % page_size + 1 for context in contexts])
        self.contexts = ints(contexts)
        self.lengths = ints(lengths)
        self.longest, self.longest_context = max(lengths), max(contexts)


class FlashInferAdapter:
    """Has the calls at hand, which are made where FlashInfer is installed."""

    def __init__(self) -> None:
        from baselines.kernels import flashinfer_calls

        self._calls = flashinfer_calls


class CudaCoreDecode(FlashInferAdapter):
    """FlashInfer's decode kernel without tensor cores."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        return self._calls.plan_decode(Pages(layout, slice(0, layout.decodes), kv_P2HSD.shape[3]), kv_P2HSD, heads)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, o_THD: Tensor) -> None:
        self._calls.run_decode(plan, q_THD, kv_P2HSD, o_THD)


class HolisticAttention(FlashInferAdapter):
    """FlashInfer's BatchAttention: one persistent kernel for all rows of a step."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        return self._calls.plan_holistic(Pages(layout, slice(None), kv_P2HSD.shape[3]), kv_P2HSD, heads)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, o_THD: Tensor) -> None:
        self._calls.run_holistic(plan, q_THD, kv_P2HSD, o_THD)


class Cascade(FlashInferAdapter):
    """FlashInfer's cascade: what all rows share is read once for all, the rest row by row, and both are merged."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, shared_pages: int) -> Any:
        page_size, rows = kv_P2HSD.shape[3], layout.decodes
        first = Pages(layout, slice(0, 1), page_size)
        first.starts = first.starts.new_tensor([0, rows])
        first.page_starts = first.starts.new_tensor([0, shared_pages])
        first.pages, first.last = first.pages[:shared_pages], first.starts.new_tensor([page_size])
        return self._calls.plan_cascade([first, Pages(layout, slice(0, rows), page_size, shared_pages)], kv_P2HSD, heads)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any) -> Tensor:
        o_THD: Tensor = self._calls.run_cascade(plan, q_THD, kv_P2HSD)
        return o_THD


class Pod(FlashInferAdapter):
    """FlashInfer's POD: one chunk and the decodes in one launch. The chunk's keys and values are gathered beforehand."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        decodes, page_size = layout.decodes, kv_P2HSD.shape[3]
        pages_M = layout.pages_RM[decodes, : -(-layout.contexts[decodes] // page_size)].long()
        k_LHD, v_LHD = kv_P2HSD[pages_M].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : layout.contexts[decodes]].contiguous()
        plan = self._calls.plan_pod(Pages(layout, slice(0, decodes), page_size), kv_P2HSD, heads)
        return decodes, k_LHD, v_LHD, plan

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        decodes, k_LHD, v_LHD, wrapper = plan
        chunk, decoded = self._calls.run_pod(wrapper, q_THD[decodes:], k_LHD, v_LHD, q_THD[:decodes], kv_P2HSD)
        return decoded, chunk


class BatchPod(FlashInferAdapter):
    """FlashInfer's batch POD: chunks and decodes in one launch, all from their pages."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        decodes, page_size = layout.decodes, kv_P2HSD.shape[3]
        chunks = Pages(layout, slice(decodes, None), page_size)
        return decodes, self._calls.plan_batch_pod(chunks, Pages(layout, slice(0, decodes), page_size), kv_P2HSD, heads)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        decodes, wrapper = plan
        chunks, decoded = self._calls.run_batch_pod(wrapper, q_THD[decodes:], q_THD[:decodes], kv_P2HSD)
        return decoded, chunks


class CudnnDecode(FlashInferAdapter):
    """cuDNN's paged attention through FlashInfer."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        pages = Pages(layout, slice(0, layout.decodes), kv_P2HSD.shape[3])
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=kv_P2HSD.device)
        return pages, layout.pages_RM[: layout.decodes].int().contiguous(), workspace

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, o_THD: Tensor) -> None:
        self._calls.cudnn_decode(*plan, q_THD, kv_P2HSD, o_THD)


class CudnnPrefill(FlashInferAdapter):
    """The same for prefills."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        pages = Pages(layout, slice(layout.decodes, None), kv_P2HSD.shape[3])
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=kv_P2HSD.device)
        return pages, layout.pages_RM[layout.decodes :].int().contiguous(), workspace

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, o_THD: Tensor) -> None:
        self._calls.cudnn_prefill(*plan, q_THD, kv_P2HSD, o_THD)


class TorchCudnnPrefill:
    """cuDNN's attention through PyTorch, which has no pages: keys and values are gathered beforehand."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> tuple[int, Tensor, Tensor]:
        assert len(set(layout.contexts)) == 1 and layout.lengths == layout.contexts, "prompts of one length, whole"
        kv_RM2HSD = kv_P2HSD[layout.pages_RM.long()]
        k_RHLD, v_RHLD = kv_RM2HSD.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, : layout.contexts[0]].contiguous()
        return len(layout.lengths), k_RHLD, v_RHLD

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: tuple[int, Tensor, Tensor]) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        rows, k_RHLD, v_RHLD = plan
        q_RHQD = q_THD.view(rows, -1, *q_THD.shape[1:]).transpose(1, 2)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            o_RHQD = F.scaled_dot_product_attention(q_RHQD, k_RHLD, v_RHLD, is_causal=True, enable_gqa=True)
        return o_RHQD.transpose(1, 2).flatten(0, 1)


class VllmFlash:
    """FA3 as vLLM calls it, for all rows of a step at once. Its pages are [slot, head, dim], of which ours are a view."""

    def __init__(self) -> None:
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        self._attend = flash_attn_varlen_func

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> Any:
        return Pages(layout, slice(None), kv_P2HSD.shape[3]), layout.pages_RM.int().contiguous()

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, o_THD: Tensor) -> None:
        pages, table = plan
        k_PSHD, v_PSHD = kv_P2HSD.transpose(2, 3).unbind(1)
        self._attend(
            q=q_THD,
            k=k_PSHD,
            v=v_PSHD,
            max_seqlen_q=pages.longest,
            cu_seqlens_q=pages.starts,
            max_seqlen_k=pages.longest_context,
            seqused_k=pages.contexts,
            block_table=table,
            softmax_scale=q_THD.shape[2] ** -0.5,
            causal=True,
            out=o_THD,
            fa_version=3,
        )
