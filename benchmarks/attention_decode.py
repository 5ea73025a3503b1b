"""Attention of decode rows: the own kernel for whole steps against XQA, at Qwen3-30B-A3B's shape, bfloat16, in a CUDA graph.

    python -m benchmarks.attention_decode

XQA is told the longest context that may come, as a graph that is captured once must: near the real one, or far from it. Every call of
a graph reads other pages, more than the L2 cache holds in all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu_timing import graph_us
from inference_service.kernels.attention import StepLayout
from inference_service.kernels.attention_mixed import TritonPagedAttention
from inference_service.kernels.flashinfer_xqa import XqaDecode

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 4, 128, 64
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (192, 320, 1024)
POOL_PAGES = 16384
FAR = 16384
COLD_BYTES = 160 << 20


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    kv = torch.randn(POOL_PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    own, xqa = TritonPagedAttention(), XqaDecode()
    for context, batch in product(CONTEXTS, BATCHES):
        pages = context // PAGE_SIZE * batch
        size = pages * kv[0].numel() * kv.element_size()
        calls = min(256, max(3, -(-COLD_BYTES // size)), POOL_PAGES // pages)
        tables = torch.randperm(POOL_PAGES, device="cuda")[: calls * pages].int().view(calls, batch, -1)
        q = torch.randn(batch, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        o = torch.empty_like(q)
        ours, near, far = [], [], []
        for pages_BM in tables.unbind():
            ours.append(own_call(own, q, kv, layout_of(context, pages_BM, FAR)))
            near.append(xqa_call(xqa, q, kv, layout_of(context, pages_BM, -(-context // 512) * 512), o))
            far.append(xqa_call(xqa, q, kv, layout_of(context, pages_BM, FAR), o))
        apart = ((ours[0]().float() - far[0]().float()).norm() / o.float().norm()).item()
        times = {"own": graph_us(ours, 10), "xqa near": graph_us(near, 10), "xqa far": graph_us(far, 10)}
        timed = ", ".join(f"{name} {us:6.1f} us {size / us / 1e6:4.2f} TB/s" for name, us in times.items())
        print(f"context {context:4}, batch {batch:3}: {timed}; apart by {apart:.4f}", flush=True)


def own_call(own: TritonPagedAttention, q: Tensor, kv: Tensor, layout: StepLayout) -> Callable[[], Tensor]:
    return partial(own, q, kv, own.plan(layout, kv, HEADS))


def xqa_call(xqa: XqaDecode, q: Tensor, kv: Tensor, layout: StepLayout, o: Tensor) -> Callable[[], Tensor]:
    plan = xqa.plan(layout, kv, HEADS)

    def call() -> Tensor:
        xqa(q, kv, plan, o)
        return o

    return call


def layout_of(context: int, pages_BM: Tensor, longest: int) -> StepLayout:
    """A step of decodes at one context, with a page table for the longest."""
    batch, pages = pages_BM.shape
    table = torch.nn.functional.pad(pages_BM, (0, longest // PAGE_SIZE - pages))
    contexts = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    return StepLayout(batch, [1] * batch, [context] * batch, contexts - 1, rows, table, contexts)


if __name__ == "__main__":
    main()
