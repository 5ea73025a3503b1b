"""Softmax over the experts, the K best and their weights in one Triton kernel: a warp a token.

Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_launch import Launched, dependent_launch


@Launched
@triton.jit
def _route(
    logits_TE,
    ids_TK,
    weights_TK,
    stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    experts, slots = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logits = tl.load(logits_TE + token * stride + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    mass = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(mass, 0)
    left = tl.where(experts < E, mass, -1.0)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        weight, best = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        ids = tl.where(slots == k, best, ids)
        weights = tl.where(slots == k, weight, weights)
        left = tl.where(experts == best, -1.0, left)
    if RENORMALIZE:
        total = tl.sum(weights, 0)
    # NaN logits must not lead to an expert that does not exist.
    ids = tl.minimum(tl.maximum(ids, 0), E - 1)
    tl.store(ids_TK + token * K + slots, ids, mask=slots < K)
    tl.store(weights_TK + token * K + slots, weights / total, mask=slots < K)


def _empty(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    size = len(logits_TE), top_k
    return logits_TE.new_empty(size, dtype=torch.int32), logits_TE.new_empty(size, dtype=torch.float32)


@custom_op(_empty)
def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """int32 ids_TK, the best first, and float32 weights_TK. Of equal experts the lower id is taken."""
    tokens, experts = logits_TE.shape
    ids_TK, weights_TK = _empty(logits_TE, top_k, renormalize)
    if tokens:
        _route[(tokens,)](
            logits_TE,
            ids_TK,
            weights_TK,
            logits_TE.stride(0),
            E=experts,
            K=top_k,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(top_k),
            RENORMALIZE=renormalize,
            num_warps=1,
            **dependent_launch(logits_TE.device),
        )
    return ids_TK, weights_TK
