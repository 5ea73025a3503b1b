"""Copies of whole KV pages, before a step: a choice that goes on from another's prompt gets its last page for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from inference_service.kernels.fp8 import as_bytes


def copy_pages(caches: list[Tensor], copies: list[tuple[int, int]]) -> None:
    """Copy pages (from, to) in every layer's kv_P2HSD. All are read before any is written, so a source may be another's target.

    Nothing waits for the device: the copies are queued on the current stream.
    """
    device = caches[0].device
    pages_2C = torch.tensor(list(zip(*copies, strict=True)), dtype=torch.int64, pin_memory=device.type == "cuda")
    source_C, target_C = pages_2C.to(device, non_blocking=True)
    for cache in caches:
        kv_P2HSD = as_bytes(cache)
        kv_P2HSD.index_copy_(0, target_C, kv_P2HSD.index_select(0, source_C))
