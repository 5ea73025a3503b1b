"""Causal attention to latents in one Triton kernel, decode rows and prefill chunks alike, each token for itself.

A program is a token and 16 of its heads, the rows of the products; latents are loaded once for both of these. Where that makes few
programs, contexts are split, and a second kernel combines the parts. Shapes as in `mla`, and X parts of a split context.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op, nothing
from inference_service.kernels.triton_launch import Launched, dependent_launch
from inference_service.kernels.triton_paged import LOG2_E, _pages

HEADS_A_PROGRAM = 16


# Where the step's inputs lie in memory, and how wide the page table is, must not make a new variant of the kernel.
@Launched
@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["positions_T", "row_T", "pages_RM"])
def _attend(
    q_THL,
    q_THR,
    kv_P11SD,
    o_THL,
    o_THXL,
    weight_THX,
    positions_T,
    row_T,
    pages_RM,
    q_token,
    q_head,
    rope_token,
    rope_head,
    o_token,
    o_head,
    pages_stride,
    scale,
    HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, 16 heads and a part of the context, BLOCK positions at a time. Scores, `scale` among them, are powers of two. The first
    six strides are those of tokens and heads."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * 16 + tl.arange(0, 16)
    exists = head < HEADS
    slot = tl.arange(0, BLOCK)
    dim, turned = tl.arange(0, LATENT)[None, :], tl.arange(0, ROPE)[None, :]
    position = tl.load(positions_T + token).to(tl.int32)
    position = tl.where(position < -1, -1 - position, position)
    table_M = pages_RM + tl.load(row_T + token).to(tl.int64) * pages_stride
    q = tl.load(q_THL + token * q_token + head[:, None] * q_head + dim, mask=exists[:, None], other=0.0)
    q_turned = tl.load(q_THR + token * rope_token + head[:, None] * rope_head + turned, mask=exists[:, None], other=0.0)

    blocks = (position + BLOCK) // BLOCK
    share = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(2) * share
    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    o = tl.zeros([16, LATENT], tl.float32)
    # A block ahead, so that the loads of latents depend on none of their own iteration, and are pipelined.
    page = _pages(table_M, first, slot, position, PAGE_SIZE, BLOCK)
    for block in range(first, tl.minimum(first + share, blocks)):
        at = block * BLOCK + slot
        visible = (at <= position)[:, None]
        rows = (page * PAGE_SIZE + at % PAGE_SIZE)[:, None] * (LATENT + ROPE)
        page = _pages(table_M, block + 1, slot, position, PAGE_SIZE, BLOCK)
        # What lies beyond the context may be anything, even NaN.
        k = tl.load(kv_P11SD + rows + dim, mask=visible, other=0.0)
        k_turned = tl.load(kv_P11SD + rows + LATENT + turned, mask=visible, other=0.0)
        scores = (tl.dot(q, tl.trans(k)) + tl.dot(q_turned, tl.trans(k_turned))) * scale
        scores = tl.where(tl.trans(visible), scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - highest)
        p = tl.exp2(scores - highest[:, None])
        total = total * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(k.dtype), k, o * shrink[:, None])
        top = highest

    # Without anything to attend to, as padded tokens and some parts are: zeros.
    some = total > 0
    total = tl.where(some, total, 1.0)
    o = o / total[:, None]
    if SPLITS == 1:
        tl.store(o_THL + token * o_token + head[:, None] * o_head + dim, o, mask=exists[:, None])
    else:
        part = (token * HEADS + head) * SPLITS + tl.program_id(2)
        tl.store(o_THXL + part[:, None] * LATENT + dim, o, mask=(exists & some)[:, None])
        tl.store(weight_THX + part, tl.where(some, top + tl.log2(total), float("-inf")), mask=exists)


@Launched
@triton.jit
def _combine(
    o_THXL,
    weight_THX,
    o_THL,
    o_token,
    o_head,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK dimensions of the parts of one token and head, weighted by powers of two. Parts of nothing are not read: no one wrote them."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0).to(tl.int64)
    part = pair * SPLITS + tl.arange(0, SPLITS)
    dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(weight_THX + part)
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e30))
    o = tl.load(o_THXL + part[:, None] * LATENT + dim[None, :], mask=(weight > 0)[:, None], other=0.0)
    total = tl.sum(weight, 0)
    target = o_THL + pair // HEADS * o_token + pair % HEADS * o_head + dim
    tl.store(target, tl.sum(o * weight[:, None], 0) / tl.where(total > 0, total, 1.0))


@custom_op(nothing, mutates=("o_THL",))
def mla_attend(
    q_THL: Tensor,
    q_THR: Tensor,
    kv_P11SD: Tensor,
    positions_T: Tensor,
    row_T: Tensor,
    pages_RM: Tensor,
    splits: int,
    o_THL: Tensor,
    scale: float,
    block: int = 32,
    stages: int = 3,
    warps: int = 4,
) -> None:
    """Write the attended latents into `o_THL`. Positions are as in `attention_mixed.StepAttention`.

    `splits`, L and R are powers of two; the last dimensions are contiguous, as the cache is.
    """
    (tokens, heads, latent), rope, device = q_THL.shape, q_THR.shape[2], q_THL.device
    assert kv_P11SD.is_contiguous() and kv_P11SD.shape[4] == latent + rope and positions_T.shape == row_T.shape == (tokens,)
    assert q_THL.stride(2) == q_THR.stride(2) == o_THL.stride(2) == pages_RM.stride(1) == 1
    parts = (tokens, heads, splits) if splits > 1 else (0, 0, 0)
    o_THXL = torch.empty(*parts, latent, dtype=torch.float32, device=device)
    weight_THX = torch.empty(parts, dtype=torch.float32, device=device)
    _attend[(tokens, triton.cdiv(heads, HEADS_A_PROGRAM), splits)](
        q_THL,
        q_THR,
        kv_P11SD,
        o_THL,
        o_THXL,
        weight_THX,
        positions_T,
        row_T,
        pages_RM,
        *q_THL.stride()[:2],
        *q_THR.stride()[:2],
        *o_THL.stride()[:2],
        pages_RM.stride(0),
        scale * LOG2_E,
        HEADS=heads,
        PAGE_SIZE=kv_P11SD.shape[3],
        LATENT=latent,
        ROPE=rope,
        SPLITS=splits,
        BLOCK=block,
        num_warps=warps,
        num_stages=stages,
        **dependent_launch(device),
    )
    if splits > 1:
        each = min(latent, 128)
        _combine[(tokens * heads, latent // each)](
            o_THXL,
            weight_THX,
            o_THL,
            *o_THL.stride()[:2],
            HEADS=heads,
            LATENT=latent,
            SPLITS=splits,
            BLOCK=each,
            num_warps=4,
            **dependent_launch(device),
        )
