"""DeepSeek's routing in one Triton kernel: scores, the best groups, the best experts among these, and their weights; a warp a token.

Shapes as in `grouped_routing`.
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
    bias_E,
    ids_TK,
    weights_TK,
    stride,
    scale,
    MEMBERS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token. Groups are rows of MEMBERS experts each, both padded to powers of two."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_M)
    expert = group[:, None] * MEMBERS + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    logits = tl.load(logits_TE + token * stride + expert, mask=exists, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1 / (1 + tl.exp(-logits))
        choice = score + tl.load(bias_E + expert, mask=exists, other=0.0)
    else:
        score = tl.exp(logits - tl.max(tl.max(logits, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
        choice = score
    # NaN must not win over what can be chosen.
    choice = tl.where(exists & (choice == choice), choice, float("-inf"))

    if TOP_GROUPS < GROUPS:
        best, where = tl.max(choice, 1, return_indices=True, return_indices_tie_break_left=True)
        if SIGMOID:
            best += tl.max(tl.where(member[None, :] == where[:, None], float("-inf"), choice), 1)
        kept = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            _, chosen = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
            kept = tl.where(group == chosen, 1, kept)
            best = tl.where(group == chosen, float("-inf"), best)
        choice = tl.where((kept > 0)[:, None], choice, float("-inf"))

    slots = tl.arange(0, BLOCK_K)
    flat = tl.reshape(choice, [BLOCK_G * BLOCK_M])
    scores = tl.reshape(score, [BLOCK_G * BLOCK_M])
    place = tl.arange(0, BLOCK_G * BLOCK_M)
    ids = tl.zeros([BLOCK_K], tl.int32)
    weights = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        _, best_at = tl.max(flat, 0, return_indices=True, return_indices_tie_break_left=True)
        ids = tl.where(slots == k, best_at // BLOCK_M * MEMBERS + best_at % BLOCK_M, ids)
        weights = tl.where(slots == k, tl.sum(tl.where(place == best_at, scores, 0.0), 0), weights)
        flat = tl.where(place == best_at, float("-inf"), flat)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    # Nor may it lead to an expert that does not exist.
    ids = tl.minimum(tl.maximum(ids, 0), GROUPS * MEMBERS - 1)
    tl.store(ids_TK + token * K + slots, ids, mask=slots < K)
    tl.store(weights_TK + token * K + slots, weights * scale, mask=slots < K)


def _empty(logits_TE: Tensor, bias_E: Tensor | None, top_k: int, *rest: object) -> tuple[Tensor, Tensor]:
    size = len(logits_TE), top_k
    return logits_TE.new_empty(size, dtype=torch.int32), logits_TE.new_empty(size, dtype=torch.float32)


@custom_op(_empty)
def route_grouped(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: int, top_groups: int, sigmoid: bool, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """int32 ids_TK, the best first, and float32 weights_TK, as `GroupedSpec` says. Of equal experts or groups the lower one is taken."""
    assert logits_TE.stride(1) == 1 and (bias_E is not None) == sigmoid
    tokens, experts = logits_TE.shape
    ids_TK, weights_TK = _empty(logits_TE, bias_E, top_k)
    if tokens:
        _route[(tokens,)](
            logits_TE,
            logits_TE if bias_E is None else bias_E,
            ids_TK,
            weights_TK,
            logits_TE.stride(0),
            scale,
            MEMBERS=experts // groups,
            GROUPS=groups,
            TOP_GROUPS=top_groups,
            K=top_k,
            BLOCK_M=triton.next_power_of_2(experts // groups),
            BLOCK_G=triton.next_power_of_2(groups),
            BLOCK_K=triton.next_power_of_2(top_k),
            SIGMOID=sigmoid,
            RENORMALIZE=renormalize,
            num_warps=1,
            **dependent_launch(logits_TE.device),
        )
    return ids_TK, weights_TK
