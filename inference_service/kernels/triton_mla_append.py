"""Norm of latents, rotation and append of MLA in one Triton kernel.

Shapes as in `mla`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op, nothing
from inference_service.kernels.triton_launch import Launched, dependent_launch

HEADS_A_PROGRAM = 8


# Where the step's inputs lie in memory, and how wide the page table is, must not make a new variant of the kernel.
@Launched
@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["positions_T", "row_T", "pages_RM"])
def _append(
    q_THQ,
    kv_TD,
    norm_L,
    eps,
    kv_P11SD,
    table_PR,
    positions_T,
    row_T,
    pages_RM,
    q_stride,
    kv_stride,
    pages_stride,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first program of a token appends, each other one rotates BLOCK_H of its query heads in place. Float32 inside."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_R)[None, :]
    position = tl.load(positions_T + token).to(tl.int64)
    angle = table_PR + tl.maximum(position, -1 - position) * (2 * HALF) + pair
    cos, sin = tl.load(angle, mask=pair < HALF, other=0.0), tl.load(angle + HALF, mask=pair < HALF, other=0.0)

    if tl.program_id(1) == 0:
        if position >= 0:
            page = tl.load(pages_RM + tl.load(row_T + token).to(tl.int64) * pages_stride + position // PAGE_SIZE).to(tl.int64)
            slot = kv_P11SD + (page * PAGE_SIZE + position % PAGE_SIZE) * (LATENT + 2 * HALF)
            source = kv_TD + token * kv_stride
            dim = tl.arange(0, BLOCK_L)
            latent = tl.load(source + dim, mask=dim < LATENT, other=0.0).to(tl.float32)
            latent *= tl.rsqrt(tl.sum(latent * latent, 0) / LATENT + eps)
            latent *= tl.load(norm_L + dim, mask=dim < LATENT, other=0.0).to(tl.float32)
            tl.store(slot + dim, latent, mask=dim < LATENT)
            low = tl.load(source + LATENT + pair, mask=pair < HALF, other=0.0).to(tl.float32)
            high = tl.load(source + LATENT + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
            tl.store(slot + LATENT + pair, low * cos - high * sin, mask=pair < HALF)
            tl.store(slot + LATENT + HALF + pair, high * cos + low * sin, mask=pair < HALF)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        exists = (head < HEADS) & (pair < HALF)
        rotated = q_THQ + token * q_stride + head * HEAD + (HEAD - 2 * HALF) + pair
        low = tl.load(rotated, mask=exists, other=0.0).to(tl.float32)
        high = tl.load(rotated + HALF, mask=exists, other=0.0).to(tl.float32)
        tl.store(rotated, low * cos - high * sin, mask=exists)
        tl.store(rotated + HALF, high * cos + low * sin, mask=exists)


@custom_op(nothing, mutates=("q_THQ", "kv_P11SD"))
def mla_append(
    q_THQ: Tensor,
    kv_TD: Tensor,
    norm_L: Tensor,
    eps: float,
    kv_P11SD: Tensor,
    table_PR: Tensor,
    positions_T: Tensor,
    row_T: Tensor,
    pages_RM: Tensor,
) -> None:
    """Rotate the queries in place, and append to the cache, which is contiguous, as the heads of a query are and the rows of the others."""
    (tokens, heads, head), latent, rope = q_THQ.shape, len(norm_L), table_PR.shape[1]
    assert kv_P11SD.is_contiguous() and q_THQ.stride()[1:] == (head, 1) and kv_TD.stride(1) == pages_RM.stride(1) == 1
    assert kv_TD.shape[1] == kv_P11SD.shape[4] == latent + rope
    _append[(tokens, 1 + triton.cdiv(heads, HEADS_A_PROGRAM))](
        q_THQ,
        kv_TD,
        norm_L,
        eps,
        kv_P11SD,
        table_PR,
        positions_T,
        row_T,
        pages_RM,
        q_THQ.stride(0),
        kv_TD.stride(0),
        pages_RM.stride(0),
        HEADS=heads,
        HEAD=head,
        LATENT=latent,
        HALF=rope // 2,
        PAGE_SIZE=kv_P11SD.shape[3],
        BLOCK_H=HEADS_A_PROGRAM,
        BLOCK_L=triton.next_power_of_2(latent),
        BLOCK_R=triton.next_power_of_2(rope // 2),
        num_warps=4,
        **dependent_launch(q_THQ.device),
    )
