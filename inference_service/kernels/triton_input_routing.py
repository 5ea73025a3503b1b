"""Llama 4's routing in one Triton kernel: the best expert, its sigmoid, and the token's input scaled by it.

Shapes as in `input_routing`.
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
    x_TC,
    ids_T1,
    y_TC,
    logits_stride,
    x_stride,
    E: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token and BLOCK_C of its inputs; the first program of a token tells its expert."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    logits = tl.load(logits_TE + token * logits_stride + expert, mask=expert < E, other=float("-inf")).to(tl.float32)
    best, where = tl.max(logits, 0, return_indices=True, return_indices_tie_break_left=True)
    if tl.program_id(1) == 0:
        # NaN logits must not lead to an expert that does not exist.
        tl.store(ids_T1 + token, tl.minimum(tl.maximum(where, 0), E - 1))
    dim = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    x = tl.load(x_TC + token * x_stride + dim, mask=dim < C, other=0.0).to(tl.float32)
    tl.store(y_TC + token * C + dim, x / (1 + tl.exp(-best)), mask=dim < C)


def _empty(logits_TE: Tensor, x_TC: Tensor) -> tuple[Tensor, Tensor]:
    return logits_TE.new_empty(len(logits_TE), 1, dtype=torch.int32), x_TC.new_empty(x_TC.shape)


@custom_op(_empty)
def route_input(logits_TE: Tensor, x_TC: Tensor) -> tuple[Tensor, Tensor]:
    """int32 ids_T1 and y_TC. Of equal experts the lower id is taken."""
    assert logits_TE.stride(1) == x_TC.stride(1) == 1
    (tokens, experts), hidden = logits_TE.shape, x_TC.shape[1]
    ids_T1, y_TC = _empty(logits_TE, x_TC)
    if tokens:
        block = min(triton.next_power_of_2(hidden), 2048)
        _route[(tokens, triton.cdiv(hidden, block))](
            logits_TE,
            x_TC,
            ids_T1,
            y_TC,
            logits_TE.stride(0),
            x_TC.stride(0),
            E=experts,
            C=hidden,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_C=block,
            num_warps=4,
            **dependent_launch(logits_TE.device),
        )
    return ids_T1, y_TC
