"""FlashInfer's FA2 and FA3 kernels for MLA, planned on the host once a step; those of decodes also where a CUDA graph holds them;
and the own kernel in front of FA3, for few decodes.

Shapes as in `mla`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.attention_mixed import PagedPlan
from inference_service.kernels.flashinfer_paged import LATENT_WORKSPACE_BYTES, WrapperRing, flat_pages, pinned, shared_workspace
from inference_service.kernels.mla import AbsorbedRows, HostPlanned, LatentAttention, UpProjection
from inference_service.kernels.mla_paged import TritonLatentDecode

LATENT, ROPE, HEAD_DIM, VALUE_DIM = 512, 64, 192, 128
"""L, R, Q and V as FlashInfer's kernels take them."""
EXPANDED_TOKENS = 16384
"""A step whose contexts are longer together attends in the absorbed form: their keys and values would take too much memory."""
FEW_ROWS = 4
"""One row takes the own kernel less than FA3 at most sizes, 8 take it more (python -m benchmarks.mla); and a step of few rows is short
beside a plan, which takes the host 0.1 to 0.3 ms."""


class FlashInferLatent(HostPlanned):
    """Some rows in the absorbed form, by FlashInfer's `backend`, over pages.

    A kernel's grid is given by the device and the heads. How its blocks share out the rows is read on the device, from where a plan is
    copied to; so a captured kernel does as the plan says that was copied before its replay.
    """

    def __init__(self, backend: str, prefills: bool) -> None:
        """`prefills`: for prefill rows, else for decode rows."""
        from inference_service.kernels import flashinfer_ops

        self._ops, self._backend, self._prefills = flashinfer_ops, backend, prefills
        self._ring = WrapperRing(lambda workspace: flashinfer_ops.make_mla_wrapper(workspace, backend))
        self._graphs: defaultdict[AttentionSpec, dict[torch.Size, int]] = defaultdict(dict)
        """Graphs' wrappers by the shape of the page table. Those of a spec share what a plan lies in, since steps run one by one."""
        self._copied: defaultdict[AttentionSpec, torch.cuda.Event] = defaultdict(torch.cuda.Event)
        """When the device has copied the last plan of a graph."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> int:
        """The number of the wrapper that holds the plan."""
        if layout.captured:
            return self._graphs[spec][layout.pages_RM.shape]
        rows = slice(layout.decodes, None) if self._prefills else slice(0, layout.decodes)
        contexts = layout.contexts[rows]
        pages = [-(-context // kv_P11SD.shape[3]) for context in contexts]
        wrapper, copied = self._ring.next(kv_P11SD.device, spec, LATENT_WORKSPACE_BYTES)
        self._plan(wrapper, layout.lengths[rows], pages, flat_pages(layout.pages_RM[rows], pages), contexts, kv_P11SD, heads, spec)
        copied.record()
        return wrapper

    def plan_replay(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> None:
        rows, width = layout.pages_RM.shape
        # A padded row does what its twin does, the row with the shortest context.
        contexts = layout.contexts + [min(layout.contexts, default=1)] * (rows - len(layout.contexts))
        wrapper, copied = self._of_graph(layout.pages_RM, spec), self._copied[spec]
        # The plan before leaves the pinned memory once the step before that has run.
        copied.synchronize()
        # A row's pages begin where they do in the table, and end with its context.
        self._plan(wrapper, [1] * rows, [width] * rows, layout.pages_RM.view(-1), contexts, kv_P11SD, heads, spec)
        copied.record()

    def _of_graph(self, pages_RM: Tensor, spec: AttentionSpec) -> int:
        wrappers, shape = self._graphs[spec], pages_RM.shape
        if shape not in wrappers:
            workspace, twin = shared_workspace(pages_RM.device, LATENT_WORKSPACE_BYTES), next(iter(wrappers.values()), None)
            wrappers[shape] = self._ops.make_mla_graph_wrapper(workspace, self._backend, len(pages_RM), pages_RM.numel(), twin)
        return wrappers[shape]

    def _plan(
        self,
        wrapper: int,
        lengths: list[int],
        page_counts: list[int],
        pages: Tensor,
        contexts: list[int],
        kv_P11SD: Tensor,
        heads: int,
        spec: AttentionSpec,
    ) -> None:
        device = kv_P11SD.device
        self._ops.plan_mla(
            wrapper,
            pinned([0, *accumulate(lengths)], device),
            pinned([0, *accumulate(page_counts)], device),
            pages,
            pinned(contexts, device),
            heads,
            LATENT,
            kv_P11SD,
            spec.scale_for(kv_P11SD.shape[4]),
        )

    def __call__(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, plan: int, o_THL: Tensor) -> None:
        self._ops.mla_paged(q_THL, q_THR, kv_P11SD, plan, o_THL)


class TritonOrFa3Latent(HostPlanned):
    """Decode rows by the own kernel or by FA3, by their number, which the host knows; a graph's is that of its table."""

    def __init__(self) -> None:
        self._few, self._many = TritonLatentDecode(), FlashInferLatent("fa3", prefills=False)

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> PagedPlan | int:
        plan: PagedPlan | int = self._by(layout.decodes).plan(layout, kv_P11SD, heads, spec)
        return plan

    def plan_replay(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> None:
        if len(layout.pages_RM) > FEW_ROWS:
            self._many.plan_replay(layout, kv_P11SD, heads, spec)

    def __call__(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, plan: PagedPlan | int, o_THL: Tensor) -> None:
        self._by(len(q_THL))(q_THL, q_THR, kv_P11SD, plan, o_THL)

    def _by(self, rows: int) -> LatentAttention:
        return self._few if rows <= FEW_ROWS else self._many


@dataclass(frozen=True)
class ExpandedPlan:
    wrapper: int
    slot_K: Tensor
    """Of the whole cache: where the rows' contexts are, one after the other."""


class FlashInferMlaPrefill:
    """Prefill rows expanded, all at once; or absorbed, where their contexts are too long for that."""

    def __init__(self, backend: str) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops
        self._reads_on = backend == "fa3"
        self._absorbed = AbsorbedRows(FlashInferLatent(backend, prefills=True))
        self._ring = WrapperRing(lambda workspace: flashinfer_ops.make_ragged_wrapper(workspace, backend))

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> ExpandedPlan | int:
        device, page_size = kv_P11SD.device, kv_P11SD.shape[3]
        lengths, contexts = layout.lengths[layout.decodes :], layout.contexts[layout.decodes :]
        if sum(contexts) > EXPANDED_TOKENS:
            absorbed: int = self._absorbed.plan(layout, kv_P11SD, heads, spec)
            return absorbed
        wrapper, copied = self._ring.next(device, spec, LATENT_WORKSPACE_BYTES)
        starts, context_starts = (pinned([0, *accumulate(each)], device) for each in (lengths, contexts))
        scale = spec.scale_for(kv_P11SD.shape[4])
        self._ops.plan_ragged(wrapper, starts, context_starts, heads, heads, HEAD_DIM, VALUE_DIM, scale, kv_P11SD.dtype)
        copied.record()
        slots = [
            (pages_M[: -(-context // page_size), None] * page_size + torch.arange(page_size, device=device)).flatten()[:context]
            for pages_M, context in zip(layout.pages_RM[layout.decodes :].unbind(), contexts, strict=True)
        ]
        return ExpandedPlan(wrapper, torch.cat(slots))

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: ExpandedPlan | int, up: UpProjection, o_THV: Tensor) -> None:
        if isinstance(plan, int):
            self._absorbed(q_THQ, kv_P11SD, plan, up, o_THV)
        else:
            k_KHQ, v_KHV = up.expand(kv_P11SD.view(-1, kv_P11SD.shape[4]).index_select(0, plan.slot_K))
            if self._reads_on:
                # Behind a row's end it multiplies the next row's values with 0, which must not give NaN.
                v_KHV.nan_to_num_(0.0, 0.0, 0.0)
            self._ops.ragged_attention(q_THQ, k_KHQ, v_KHV, plan.wrapper, o_THV)
