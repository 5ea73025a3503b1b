"""Experts for some dozens of tokens, in Triton: each chosen expert is streamed once for each 16 tokens that chose it.

First the pairs of a token and an expert are listed by expert. Then a program is an expert and some of its rows, and takes 16 of its tokens
at a time. The weight's rows stand where Hopper's instruction has 64, the tokens where it has as few as 16, so that weights go from shared
memory into it as they lie. Where they are in FP8, activations are rounded before each product, which the tensor cores then do in FP8.
Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size, A = T K pairs.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_expert_lists import list_pairs
from inference_service.kernels.triton_fp8_round import round_tokens
from inference_service.kernels.triton_launch import Launched, dependent_launch, in_parts
from inference_service.kernels.triton_sum import sum_parts

MOST_PAIRS = 8192
"""Of a launch, whose memory grows with them."""
ROWS, TOKENS, BLOCK = 64, 16, 128
"""Of a program; and columns of a load, of which C and I are multiples: those that share a scale in FP8."""
STAGES, FP8_STAGES = (3, 5), (4, 4)
"""Of gate and up, and of down: one more than blocks that are loaded at once, as fit into the 99 KiB of sm_89 and sm_120."""


@Launched
@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x_TC,
    x_scales,
    gate_up_E2IC,
    scales,
    pairs_EA,
    counts_E,
    h_AI,
    pairs,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    UP_FIRST: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = silu(gate(x)) * up(x) of ROWS values of all pairs of one expert; scales are those of FP8."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_E + expert)
    start = tl.program_id(0) * ROWS
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, 128)[None, :]
    weight = gate_up_E2IC + expert * (2 * I * C) + rows[:, None] * C + columns
    if FP8:
        row_scales = scales + (expert * (2 * I // 128) + start // 128) * (C // 128)
        second_scales = row_scales + I // 128 * (C // 128)
    for begin in range(0, count, TOKENS):
        place = begin + tl.arange(0, TOKENS)
        pair = tl.load(pairs_EA + expert * pairs + place, mask=place < count, other=0)
        exists = (place < count)[:, None]
        inputs = x_TC + (pair // K).to(tl.int64)[:, None] * C + columns
        first = tl.zeros([ROWS, TOKENS], tl.float32)
        second = tl.zeros([ROWS, TOKENS], tl.float32)
        for block in range(C // 128):
            if FP8:
                first_scale, second_scale = tl.load(row_scales + block), tl.load(second_scales + block)
                x = tl.trans(tl.load(inputs + block * 128, mask=exists, other=0.0))
                scales_R = tl.load(x_scales + (pair // K) * (C // 128) + block)
                first += tl.dot(tl.load(weight + block * 128), x) * (first_scale * scales_R)[None, :]
                second += tl.dot(tl.load(weight + I * C + block * 128), x) * (second_scale * scales_R)[None, :]
            else:
                x = tl.trans(tl.load(inputs + block * 128, mask=exists, other=0.0))
                first = tl.dot(tl.load(weight + block * 128), x, first)
                second = tl.dot(tl.load(weight + I * C + block * 128), x, second)
        if UP_FIRST:
            up, gate = first, second
        else:
            gate, up = first, second
        h = gate / (1 + tl.exp(-gate)) * up
        tl.store(h_AI + pair.to(tl.int64)[:, None] * I + rows[None, :], tl.trans(h), mask=exists)


@Launched
@triton.jit(do_not_specialize=["pairs"])
def _down(
    h_AI,
    h_scales,
    down_ECI,
    scales,
    pairs_EA,
    counts_E,
    weights_A,
    y_AC,
    pairs,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS weighted outputs of all pairs of one expert."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_E + expert)
    start = tl.program_id(0) * ROWS
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, 128)[None, :]
    weight = down_ECI + expert * (C * I) + rows[:, None] * I + columns
    if FP8:
        row_scales = scales + (expert * (C // 128) + start // 128) * (I // 128)
    for begin in range(0, count, TOKENS):
        place = begin + tl.arange(0, TOKENS)
        pair = tl.load(pairs_EA + expert * pairs + place, mask=place < count, other=0)
        exists = (place < count)[:, None]
        inputs = h_AI + pair.to(tl.int64)[:, None] * I + columns
        y = tl.zeros([ROWS, TOKENS], tl.float32)
        for block in range(I // 128):
            if FP8:
                scale = tl.load(row_scales + block)
                h = tl.trans(tl.load(inputs + block * 128, mask=exists, other=0.0))
                scales_R = tl.load(h_scales + pair * (I // 128) + block)
                y += tl.dot(tl.load(weight + block * 128), h) * (scale * scales_R)[None, :]
            else:
                h = tl.trans(tl.load(inputs + block * 128, mask=exists, other=0.0))
                y = tl.dot(tl.load(weight + block * 128), h, y)
        y *= tl.load(weights_A + pair)[None, :]
        tl.store(y_AC + pair.to(tl.int64)[:, None] * C + rows[None, :], tl.trans(y), mask=exists)


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def moe_grouped(x_TC: Tensor, gate_up_E2IC: Tensor, down_ECI: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_first: bool) -> Tensor:
    """The experts' weighted sum y_TC, of x's dtype; sums are float32, and what is between the products is of x's dtype. `up_first`: up
    stands before gate in gate_up_E2IC.

    All tensors are contiguous, C and I multiples of BLOCK; sums have one order.
    """
    launch = partial(_launch, gate_up_E2IC, down_ECI, up_first, None)
    return in_parts(launch, MOST_PAIRS, x_TC, ids_TK, weights_TK)


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def moe_grouped_fp8(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    gate_up_scales: Tensor,
    down_ECI: Tensor,
    down_scales: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_first: bool,
) -> Tensor:
    """The same with weights in FP8; x, and what is between the products, is rounded to it."""
    launch = partial(_launch, gate_up_E2IC, down_ECI, up_first, (gate_up_scales, down_scales))
    return in_parts(launch, MOST_PAIRS, x_TC, ids_TK, weights_TK)


def _launch(
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    up_first: bool,
    scales: tuple[Tensor, Tensor] | None,
    x_TC: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    y_TC: Tensor,
) -> None:
    (tokens, hidden), (experts, _, size), top_k = x_TC.shape, down_ECI.shape, ids_TK.shape[1]
    pairs, device, dependent = tokens * top_k, x_TC.device, dependent_launch(x_TC.device)
    pairs_EA, counts_E, _ = list_pairs(ids_TK, experts)
    h_AI = torch.empty(pairs, size, dtype=x_TC.dtype, device=device)
    y_AC = torch.empty(pairs, hidden, dtype=torch.float32, device=device)
    stages = STAGES if scales is None else FP8_STAGES
    common = {"C": hidden, "I": size, "FP8": scales is not None, "ROWS": ROWS, "TOKENS": TOKENS, "num_warps": 4, **dependent}
    x, x_scales, gate_up_scales = (x_TC, None, None) if scales is None else (*round_tokens(x_TC), scales[0])
    grid = size // ROWS, experts
    options = {"K": top_k, "UP_FIRST": up_first, "num_stages": stages[0], **common}
    _gate_up[grid](x, x_scales, gate_up_E2IC, gate_up_scales, pairs_EA, counts_E, h_AI, pairs, **options)
    h, h_scales, down_scales = (h_AI, None, None) if scales is None else (*round_tokens(h_AI), scales[1])
    grid = hidden // ROWS, experts
    _down[grid](h, h_scales, down_ECI, down_scales, pairs_EA, counts_E, weights_TK, y_AC, pairs, num_stages=stages[1], **common)
    sum_parts(y_AC.view(tokens, top_k, hidden), y_TC)
