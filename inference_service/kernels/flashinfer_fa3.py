"""FlashInfer's FA3 on Hopper: it loads keys and values that follow each other by TMA, but those in pages row by row.

So contexts are gathered from their pages first, which takes 5 us for 4,096 tokens of 4 KV heads and saves 48 of 285 (H200, 2026-11-30).
Shapes as in `attention`; N pages, K tokens of contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.flashinfer_paged import Fa2Prefill, WrapperRing, flat_pages, pinned, split_bytes, upload

LEAST_TOKENS = 1024
"""Of a step with fewer the device waits for the host, which has one launch more."""
CONTEXT_A_TOKEN = 64
"""Tokens of contexts for each that is computed, up to which it is worth it: even 128 of 8,192 take 102 us, and 115 in pages."""
GATHERED_BYTES = 256 << 20
"""The memory that is kept for keys and values of a layer."""


@dataclass(frozen=True)
class GatheredPlan:
    """Of attention to contexts that are gathered."""

    wrapper: int
    pages_N: Tensor
    starts_N: Tensor
    """Where a page's tokens begin among those gathered, and where the last's end."""
    tokens: int


class PagedFa3(Fa2Prefill):
    """Prefill rows by FA3 that reads pages."""

    backend = "fa3"


class Fa3Prefill:
    """Prefill rows by FA3; it reads pages where little is computed, or contexts are many times that, or more than memory is kept for."""

    backend = "fa3"

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops, triton_gather

        self._ops, self._gather = flashinfer_ops, triton_gather.gather_contexts
        self._paged = PagedFa3()
        self._ring = WrapperRing(lambda workspace: flashinfer_ops.make_ragged_wrapper(workspace, self.backend))

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> GatheredPlan | int:
        """The number of the wrapper that holds the plan, where pages are read."""
        device, (_, _, kv_heads, page_size, head_dim) = kv_P2HSD.device, kv_P2HSD.shape
        lengths, contexts = layout.lengths[layout.decodes :], layout.contexts[layout.decodes :]
        if not gathers(lengths, contexts, kv_P2HSD):
            return self._paged.plan(layout, kv_P2HSD, heads, spec)
        wrapper, copied = self._ring.next(device, spec, split_bytes(kv_P2HSD, heads))
        ends = pinned([0, *accumulate(contexts)], device)
        scale = spec.scale_for(head_dim)
        self._ops.plan_ragged(
            wrapper, pinned([0, *accumulate(lengths)], device), ends, heads, kv_heads, head_dim, head_dim, scale, kv_P2HSD.dtype
        )
        copied.record()
        pages = flat_pages(layout.pages_RM[layout.decodes :], [-(-context // page_size) for context in contexts])
        return GatheredPlan(wrapper, pages, upload(page_starts(contexts, page_size), device), sum(contexts))

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: GatheredPlan | int, o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        assert sinks_H is None
        if isinstance(plan, int):
            return self._paged(q_THD, kv_P2HSD, plan, o_THD)
        _, _, kv_heads, _, head_dim = kv_P2HSD.shape
        memory = gathered(kv_P2HSD.device).view(kv_P2HSD.dtype)
        kv_2KHD = memory[: 2 * plan.tokens * kv_heads * head_dim].view(2, plan.tokens, kv_heads, head_dim)
        self._gather(kv_P2HSD, plan.pages_N, plan.starts_N, kv_2KHD)
        self._ops.ragged_attention(q_THD, kv_2KHD[0], kv_2KHD[1], plan.wrapper, o_THD)


def gathers(lengths: Sequence[int], contexts: Sequence[int], kv_P2HSD: Tensor) -> bool:
    """Whether these rows' contexts are gathered."""
    tokens, context = sum(lengths), sum(contexts)
    _, _, kv_heads, _, head_dim = kv_P2HSD.shape
    size = context * 2 * kv_heads * head_dim * kv_P2HSD.itemsize
    return tokens >= LEAST_TOKENS and context <= CONTEXT_A_TOKEN * tokens and size <= GATHERED_BYTES


def page_starts(contexts: Sequence[int], page_size: int) -> list[int]:
    """Where the tokens of each row's pages begin, one row after the other, and where the last's end."""
    ends = [0, *accumulate(contexts)]
    return [place for start, end in pairwise(ends) for place in range(start, end, page_size)] + ends[-1:]


@cache
def gathered(device: torch.device) -> Tensor:
    """Taken whole by the first step that needs it, at the start, so that none runs out of memory later."""
    return torch.empty(GATHERED_BYTES, dtype=torch.uint8, device=device)
