"""QK norm, rotation and append in one Triton kernel: QKV is read once, and queries, keys and values go where attention reads them.

Shapes as in `kv_append`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_launch import Launched, dependent_launch

HEADS_A_PROGRAM = 8


# Where the step's inputs lie in memory, and how wide the page table is, must not make a new variant of the kernel.
@Launched
@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["positions_T", "row_T", "pages_RM"])
def _append(
    qkv_TND,
    q_THD,
    kv_P2HSD,
    q_norm_D,
    k_norm_D,
    eps,
    table_PD,
    positions_T,
    row_T,
    pages_RM,
    pages_stride,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and BLOCK of its heads, of which each stands for itself: query, key or value. Float32 inside."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, HALF)[None, :]
    exists = head < HEADS + 2 * KV_HEADS
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    source = qkv_TND + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF) + dim
    low = tl.load(source, mask=exists, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=exists, other=0.0).to(tl.float32)

    turned_low, turned_high = low, high
    if NORMED:
        square = tl.sum(low * low, axis=1, keep_dims=True) + tl.sum(high * high, axis=1, keep_dims=True)
        scale = tl.rsqrt(square / (2 * HALF) + eps)
        turned_low = low * scale * tl.where(is_query, tl.load(q_norm_D + dim), tl.load(k_norm_D + dim)).to(tl.float32)
        turned_high = high * scale * tl.where(is_query, tl.load(q_norm_D + HALF + dim), tl.load(k_norm_D + HALF + dim)).to(tl.float32)
    position = tl.load(positions_T + token).to(tl.int64)
    angle = table_PD + tl.maximum(position, -1 - position) * (2 * HALF) + dim
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    low = tl.where(is_value, low, turned_low * cos - turned_high * sin)
    high = tl.where(is_value, high, turned_high * cos + turned_low * sin)

    query = q_THD + (token * HEADS + head) * (2 * HALF) + dim
    tl.store(query, low, mask=is_query)
    tl.store(query + HALF, high, mask=is_query)
    if position >= 0:
        row = tl.load(row_T + token).to(tl.int64)
        page = tl.load(pages_RM + row * pages_stride + position // PAGE_SIZE).to(tl.int64)
        # Keys and values of a page follow each other as they do in QKV.
        block = page * (2 * KV_HEADS) + head - HEADS
        slot = kv_P2HSD + (block * PAGE_SIZE + position % PAGE_SIZE) * (2 * HALF) + dim
        if kv_P2HSD.dtype.element_ty == tl.float8e4nv:
            low, high = tl.clamp(low, -448.0, 448.0), tl.clamp(high, -448.0, 448.0)
        tl.store(slot, low, mask=exists & (head >= HEADS))
        tl.store(slot + HALF, high, mask=exists & (head >= HEADS))


def _query(qkv_TND: Tensor, kv_P2HSD: Tensor, *rest: object) -> Tensor:
    tokens, heads, head_dim = qkv_TND.shape
    return qkv_TND.new_empty(tokens, heads - 2 * kv_P2HSD.shape[2], head_dim)


@custom_op(_query, mutates=("kv_P2HSD",))
def append(
    qkv_TND: Tensor,
    kv_P2HSD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    table_PD: Tensor,
    positions_T: Tensor,
    row_T: Tensor,
    pages_RM: Tensor,
) -> Tensor:
    """Append to the cache, and give q_THD, contiguous. Without norms, heads are not normed. D is a power of two; QKV, the cache and the
    rows of `pages_RM` are contiguous."""
    assert qkv_TND.is_contiguous() and kv_P2HSD.is_contiguous() and pages_RM.stride(1) == 1
    tokens, all_heads, head_dim = qkv_TND.shape
    _, _, kv_heads, page_size, _ = kv_P2HSD.shape
    q_THD = _query(qkv_TND, kv_P2HSD)
    _append[(tokens, triton.cdiv(all_heads, HEADS_A_PROGRAM))](
        qkv_TND,
        q_THD,
        kv_P2HSD,
        qkv_TND if q_norm_D is None else q_norm_D,
        qkv_TND if k_norm_D is None else k_norm_D,
        eps,
        table_PD,
        positions_T,
        row_T,
        pages_RM,
        pages_RM.stride(0),
        NORMED=q_norm_D is not None,
        HEADS=q_THD.shape[1],
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        HALF=head_dim // 2,
        BLOCK=HEADS_A_PROGRAM,
        num_warps=4,
        **dependent_launch(qkv_TND.device),
    )
    return q_THD
