"""Causal paged attention of a whole step in one Triton kernel, decode rows and prefill chunks alike, each token for itself.

A program is a token and a KV head: the query heads that share it are the rows of the products, padded to 16. Where that makes few programs,
contexts are split, and a second kernel combines the parts. Shapes as in `attention`, and X parts of a split context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op, nothing
from inference_service.kernels.triton_launch import Launched, dependent_launch

LOG2_E = 1.4426950408889634


@triton.jit
def _pages(table_M, block, slot, position, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The page of a block of positions, or of each of them where pages are not made of whole blocks."""
    if PAGE_SIZE % BLOCK == 0:
        page = tl.load(table_M + block // (PAGE_SIZE // BLOCK), mask=block * BLOCK <= position, other=0)
    else:
        at = block * BLOCK + slot
        page = tl.load(table_M + at // PAGE_SIZE, mask=at <= position, other=0)
    return page.to(tl.int64)


# Where the step's inputs lie in memory, and how wide the page table is, must not make a new variant of the kernel.
@Launched
@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["positions_T", "row_T", "pages_RM"])
def _attend(
    q_THD,
    kv_P2HSD,
    o_THD,
    o_THXD,
    weight_THX,
    positions_T,
    row_T,
    pages_RM,
    sinks_H,
    pages_stride,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, KV head and part of the context, BLOCK positions at a time. Scores, `scale` and SOFT_CAP among them, are powers of two.

    WINDOW and SOFT_CAP are 0 where there is none.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    member = tl.arange(0, 16)
    slot = tl.arange(0, BLOCK)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    position = tl.load(positions_T + token).to(tl.int32)
    position = tl.where(position < -1, -1 - position, position)
    table_M = pages_RM + tl.load(row_T + token).to(tl.int64) * pages_stride
    head = token * (KV_HEADS * GROUP) + kv_head * GROUP + member
    exists = member < GROUP
    q = tl.load(q_THD + head[:, None] * HEAD_DIM + dim, mask=exists[:, None], other=0.0)

    blocks = (position + BLOCK) // BLOCK
    start = tl.maximum(position - (WINDOW - 1), 0) // BLOCK if WINDOW else 0
    share = tl.cdiv(blocks - start, SPLITS)
    first = start + tl.program_id(2) * share
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    if SINKS:
        # A score without a value, in the first part alone.
        sink = tl.load(sinks_H + kv_head * GROUP + member, mask=exists, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(tl.program_id(2) == 0, sink, top)
        total = tl.where(tl.program_id(2) == 0, 1.0, total)
    o = tl.zeros([16, HEAD_DIM], tl.float32)
    # A block ahead, so that the loads of keys and values depend on none of their own iteration, and are pipelined.
    page = _pages(table_M, first, slot, position, PAGE_SIZE, BLOCK)
    for block in range(first, tl.minimum(first + share, blocks)):
        at = block * BLOCK + slot
        visible = at <= position
        if WINDOW:
            visible = visible & (at > position - WINDOW)
        keys = kv_P2HSD + (page * (2 * KV_HEADS) + kv_head) * (PAGE_SIZE * HEAD_DIM)
        page = _pages(table_M, block + 1, slot, position, PAGE_SIZE, BLOCK)
        if PAGE_SIZE % BLOCK == 0:
            offset = (block % (PAGE_SIZE // BLOCK) * BLOCK + slot)[:, None] * HEAD_DIM + dim
        else:
            keys = keys[:, None]
            offset = (at % PAGE_SIZE)[:, None] * HEAD_DIM + dim
        # What lies beyond the context may be anything, even NaN.
        k = tl.load(keys + offset, mask=visible[:, None], other=0.0).to(q.dtype)
        v = tl.load(keys + KV_HEADS * PAGE_SIZE * HEAD_DIM + offset, mask=visible[:, None], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k)) * scale
        if SOFT_CAP > 0:
            scores = SOFT_CAP - 2 * SOFT_CAP / (tl.exp2(scores * (2 * 1.4426950408889634 / SOFT_CAP)) + 1)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - highest)
        p = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v, o * shrink[:, None])
        top = highest

    # Without anything to attend to, as padded tokens and some parts are: zeros.
    some = total > 0
    total = tl.where(some, total, 1.0)
    o = o / total[:, None]
    if SPLITS == 1:
        tl.store(o_THD + head[:, None] * HEAD_DIM + dim, o, mask=exists[:, None])
    else:
        part = head * SPLITS + tl.program_id(2)
        tl.store(o_THXD + part[:, None] * HEAD_DIM + dim, o, mask=(exists & some)[:, None])
        tl.store(weight_THX + part, tl.where(some, top + tl.log2(total), float("-inf")), mask=exists)


@Launched
@triton.jit
def _combine(o_THXD, weight_THX, o_THD, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """The parts of one token and head, weighted by powers of two. Parts of nothing are not read: no one wrote them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head = tl.program_id(0).to(tl.int64)
    part = head * SPLITS + tl.arange(0, SPLITS)
    dim = tl.arange(0, HEAD_DIM)
    weight = tl.load(weight_THX + part)
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e30))
    o = tl.load(o_THXD + part[:, None] * HEAD_DIM + dim[None, :], mask=(weight > 0)[:, None], other=0.0)
    total = tl.sum(weight, 0)
    tl.store(o_THD + head * HEAD_DIM + dim, tl.sum(o * weight[:, None], 0) / tl.where(total > 0, total, 1.0))


@custom_op(nothing, mutates=("o_THD",))
def attend(
    q_THD: Tensor,
    kv_P2HSD: Tensor,
    positions_T: Tensor,
    row_T: Tensor,
    pages_RM: Tensor,
    splits: int,
    o_THD: Tensor,
    scale: float,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    stages: int = 3,
    warps: int = 4,
) -> None:
    """Write the output into `o_THD`, which is contiguous. Positions are as in `StepAttention`, the rest as in `AttentionSpec`.

    `splits` is a power of two; at most 16 query heads share a KV head; D is a power of two; query, cache and the rows of `pages_RM` are
    contiguous.
    """
    assert q_THD.is_contiguous() and kv_P2HSD.is_contiguous() and pages_RM.stride(1) == 1
    (tokens, heads, head_dim), device = q_THD.shape, q_THD.device
    _, _, kv_heads, page_size, _ = kv_P2HSD.shape
    assert positions_T.shape == row_T.shape == (tokens,) and heads % kv_heads == 0 and heads <= 16 * kv_heads
    parts = (tokens, heads, splits) if splits > 1 else (0, 0, 0)
    o_THXD = torch.empty(*parts, head_dim, dtype=torch.float32, device=device)
    weight_THX = torch.empty(parts, dtype=torch.float32, device=device)
    _attend[(tokens, kv_heads, splits)](
        q_THD,
        kv_P2HSD,
        o_THD,
        o_THXD,
        weight_THX,
        positions_T,
        row_T,
        pages_RM,
        q_THD if sinks_H is None else sinks_H,
        pages_RM.stride(0),
        scale * LOG2_E,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        BLOCK=64,
        WINDOW=window or 0,
        SOFT_CAP=(soft_cap or 0.0) * LOG2_E,
        SINKS=sinks_H is not None,
        num_warps=warps,
        num_stages=stages,
        **dependent_launch(device),
    )
    if splits > 1:
        _combine[(tokens * heads,)](o_THXD, weight_THX, o_THD, HEAD_DIM=head_dim, SPLITS=splits, num_warps=4, **dependent_launch(device))
