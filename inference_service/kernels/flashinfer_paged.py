"""FlashInfer's FA2 and FA3 kernels for the paged cache: planned on the host once a step, so that no CUDA graph can hold them.

Shapes as in `attention`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout

LATENT_WORKSPACE_BYTES = 256 << 20
"""For partial outputs of attention to latents."""
IN_FLIGHT = 2
"""Steps whose plans may exist at once: one runs while the next is planned."""


def upload(values: list[int], device: torch.device) -> Tensor:
    """int32 values on the device, copied behind what it computes now."""
    return pinned(values, device).to(device, non_blocking=True)


def pinned(values: list[int], device: torch.device) -> Tensor:
    """int32 values on the host, from where a copy to the device need not wait."""
    return torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")


def flat_pages(pages_RM: Tensor, counts: list[int]) -> Tensor:
    """The first `counts` pages of each row, one row after the other, in int32."""
    return torch.cat([pages_M[:count] for pages_M, count in zip(pages_RM.unbind(), counts, strict=True)]).to(torch.int32)


class WrapperRing:
    """Wrappers by their numbers. A plan lies in its wrapper's pinned memory until the device has copied it, hence one wrapper for each
    step in flight and each spec."""

    def __init__(self, make: Callable[[Tensor], int]) -> None:
        """`make` gives a wrapper that has a workspace."""
        self._make = make
        self._rings: dict[tuple[AttentionSpec, int], deque[tuple[int, torch.cuda.Event]]] = {}

    def next(self, device: torch.device, spec: AttentionSpec, workspace_bytes: int) -> tuple[int, torch.cuda.Event]:
        """A wrapper whose plan is no longer needed, and the event to record once a plan's copy is queued."""
        if (spec, workspace_bytes) not in self._rings:
            wrappers = [self._make(shared_workspace(device, workspace_bytes)) for _ in range(IN_FLIGHT)]
            self._rings[spec, workspace_bytes] = deque((wrapper, torch.cuda.Event()) for wrapper in wrappers)  # type: ignore[no-untyped-call]
        ring = self._rings[spec, workspace_bytes]
        ring.rotate()
        ring[0][1].synchronize()
        return ring[0]


class PagedAttention:
    """Attention of some rows, by FlashInfer's `backend`."""

    backend: str

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._ops = flashinfer_ops
        self._ring = WrapperRing(lambda workspace: flashinfer_ops.make_wrapper(workspace, self.backend))

    def _rows(self, layout: StepLayout) -> slice:
        raise NotImplementedError

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> int:
        """The number of the wrapper that holds the plan."""
        device, page_size = kv_P2HSD.device, kv_P2HSD.shape[3]
        rows = self._rows(layout)
        lengths, contexts = layout.lengths[rows], layout.contexts[rows]
        pages = [-(-context // page_size) for context in contexts]
        wrapper, copied = self._ring.next(device, spec, split_bytes(kv_P2HSD, heads))
        self._ops.plan_paged(
            wrapper,
            pinned([0, *accumulate(lengths)], device),
            pinned([0, *accumulate(pages)], device),
            flat_pages(layout.pages_RM[rows], pages),
            pinned([(context - 1) % page_size + 1 for context in contexts], device),
            pinned(contexts, device),
            max(lengths),
            heads,
            kv_P2HSD,
            spec,
        )
        copied.record()
        return wrapper

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: int, o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        assert sinks_H is None
        self._ops.paged_attention(q_THD, kv_P2HSD, plan, o_THD)


class Fa2Decode(PagedAttention):
    """Decode rows by FA2 on tensor cores."""

    backend = "fa2"

    def _rows(self, layout: StepLayout) -> slice:
        return slice(0, layout.decodes)


class Fa2Prefill(PagedAttention):
    """Prefill rows by FA2."""

    backend = "fa2"

    def _rows(self, layout: StepLayout) -> slice:
        return slice(layout.decodes, None)


def split_bytes(kv_P2HSD: Tensor, heads: int) -> int:
    """What FA2 needs for partial outputs and their sums where contexts are split: 2 tiles of 128 rows a multiprocessor and query head of a
    group, in float32. FA3 does not split contexts."""
    device, kv_heads, head_dim = kv_P2HSD.device, kv_P2HSD.shape[2], kv_P2HSD.shape[4]
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tiles = 2 * multiprocessors * -(-heads // kv_heads)
    return tiles * 128 * (head_dim + 1) * 4 + 1024


@cache
def shared_workspace(device: torch.device, size: int) -> Tensor:
    """Of so many bytes; shared by all, since their kernels run one after the other."""
    return torch.empty(size, dtype=torch.uint8, device=device)
