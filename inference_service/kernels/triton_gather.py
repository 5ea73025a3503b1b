"""Contexts out of their pages, in Triton: for kernels that read keys and values where they follow each other.

Such a kernel may read values of the row behind, and multiply them with 0. So none that is no number, or infinite, leaves its pages: 0 does.
Shapes: N pages of some rows, one row's after the other's, K tokens of their contexts, H KV heads, D head dim; the cache is kv_P2HSD.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op, nothing
from inference_service.kernels.triton_launch import Launched, dependent_launch

MOST_SLOTS = 128
"""Of a page, in a program."""


# A step's pages and tokens must not make a new variant of the kernel.
@Launched
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["pages_N", "starts_N"])
def _gather(
    kv_P2HSD,
    pages_N,
    starts_N,
    kv_2KHD,
    tokens,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SLOTS: tl.constexpr,
    DIMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The keys, or the values, of one head in SLOTS of a page. DIMS is a power of two that holds HEAD_DIM."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    page = tl.load(pages_N + tl.program_id(0)).to(tl.int64)
    start = tl.load(starts_N + tl.program_id(0)).to(tl.int64)
    count = tl.load(starts_N + tl.program_id(0) + 1) - start
    head = tl.program_id(1)  # those of keys, then those of values
    slot, dim = tl.program_id(2) * SLOTS + tl.arange(0, SLOTS)[:, None], tl.arange(0, DIMS)[None, :]
    exists = (slot < count) & (dim < HEAD_DIM)
    block = page * (2 * HEADS) + head
    found = tl.load(kv_P2HSD + (block * PAGE_SIZE + slot) * HEAD_DIM + dim, mask=exists, other=0.0)
    found = tl.where((head < HEADS) | (tl.abs(found.to(tl.float32)) < float("inf")), found, tl.zeros_like(found))
    place = (head // HEADS * tokens + start + slot) * HEADS + head % HEADS
    tl.store(kv_2KHD + place * HEAD_DIM + dim, found, mask=exists)


@custom_op(nothing, mutates=("kv_2KHD",))
def gather_contexts(kv_P2HSD: Tensor, pages_N: Tensor, starts_N: Tensor, kv_2KHD: Tensor) -> None:
    """Write keys and values into `kv_2KHD`. `starts_N` has one more: the first token of each page among the K, and K, in int32; a page
    holds no more of them than it has slots. The cache and `kv_2KHD` are contiguous and of one dtype."""
    assert kv_P2HSD.is_contiguous() and kv_2KHD.is_contiguous()
    _, _, heads, page_size, head_dim = kv_P2HSD.shape
    slots = min(triton.next_power_of_2(page_size), MOST_SLOTS)
    _gather[(len(pages_N), 2 * heads, triton.cdiv(page_size, slots))](
        kv_P2HSD,
        pages_N,
        starts_N,
        kv_2KHD,
        kv_2KHD.shape[1],
        HEADS=heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        SLOTS=slots,
        DIMS=triton.next_power_of_2(head_dim),
        num_warps=4,
        **dependent_launch(kv_P2HSD.device),
    )
