"""Experts for some dozens of tokens, in Triton: each chosen expert is streamed once for all tokens that chose it.

Nothing is sorted: a program is an expert and some of its rows, and finds among all pairs of a token and an expert those of its own, 16 at a
time. The weight's rows stand where Hopper's instruction has 64, the tokens where it has as few as 16, so that weights go from shared memory
into it as they lie. Where they are in FP8, activations are rounded before each product, which the tensor cores then do in FP8.
Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size, A = T K pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_fp8_round import round_tokens
from inference_service.kernels.triton_launch import dependent_launch
from inference_service.kernels.triton_sum import sum_parts

PAIR_CLASSES = (64, 256, 512, 1024)
"""That a program may have in registers: a kernel is compiled for each, and a launch takes at most the last."""
FEW_TOKENS = 2
"""Of an expert, on average."""
BLOCK = 128
"""Columns of a load, of which C and I are multiples; in FP8, those that share a scale."""


@triton.jit
def _ranks(ids_A, expert, pairs, PAIRS: tl.constexpr):
    """The place of each pair among those of the expert, -1 for others'; and how many these are."""
    pair = tl.arange(0, PAIRS)
    mine = tl.load(ids_A + pair, mask=pair < pairs, other=-1) == expert
    rank = tl.cumsum(mine.to(tl.int32), 0) - 1
    return tl.where(mine, rank, -1), tl.sum(mine.to(tl.int32), 0)


@triton.jit(do_not_specialize=["pairs"])
def _gate_up(
    x_TC,
    x_scales,
    gate_up_E2IC,
    scales,
    ids_A,
    h_AI,
    pairs,
    PAIRS: tl.constexpr,
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
    ranks, count = _ranks(ids_A, expert, pairs, PAIRS)
    start = tl.program_id(0) * ROWS
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, 128)[None, :]
    weight = gate_up_E2IC + expert * (2 * I * C) + rows[:, None] * C + columns
    if FP8:
        row_scales = scales + (expert * (2 * I // 128) + start // 128) * (C // 128)
        second_scales = row_scales + I // 128 * (C // 128)
    for begin in range(0, count, TOKENS):
        place = begin + tl.arange(0, TOKENS)
        pair = tl.sum(tl.where(ranks[None, :] == place[:, None], tl.arange(0, PAIRS)[None, :], 0), 1)
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


@triton.jit(do_not_specialize=["pairs"])
def _down(
    h_AI,
    h_scales,
    down_ECI,
    scales,
    ids_A,
    weights_A,
    y_AC,
    pairs,
    PAIRS: tl.constexpr,
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
    ranks, count = _ranks(ids_A, expert, pairs, PAIRS)
    start = tl.program_id(0) * ROWS
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, 128)[None, :]
    weight = down_ECI + expert * (C * I) + rows[:, None] * I + columns
    if FP8:
        row_scales = scales + (expert * (C // 128) + start // 128) * (I // 128)
    for begin in range(0, count, TOKENS):
        place = begin + tl.arange(0, TOKENS)
        pair = tl.sum(tl.where(ranks[None, :] == place[:, None], tl.arange(0, PAIRS)[None, :], 0), 1)
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
    return _in_parts(x_TC, gate_up_E2IC, down_ECI, ids_TK, weights_TK, up_first, None)


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
    return _in_parts(x_TC, gate_up_E2IC, down_ECI, ids_TK, weights_TK, up_first, (gate_up_scales, down_scales))


def _in_parts(
    x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_first: bool, scales: tuple[Tensor, Tensor] | None
) -> Tensor:
    """One launch for as many tokens as a program has room for."""
    y_TC = torch.empty_like(x_TC)
    most = max(PAIR_CLASSES[-1] // ids_TK.shape[1], 1)
    for first in range(0, len(x_TC), most):
        part = slice(first, first + most)
        _launch(x_TC[part], gate_up, down, ids_TK[part], weights_TK[part], y_TC[part], up_first, scales)
    return y_TC


def _launch(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    down_ECI: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    y_TC: Tensor,
    up_first: bool,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    (tokens, hidden), (experts, _, size), top_k = x_TC.shape, down_ECI.shape, ids_TK.shape[1]
    pairs, device = tokens * top_k, x_TC.device
    h_AI = torch.empty(pairs, size, dtype=x_TC.dtype, device=device)
    y_AC = torch.empty(pairs, hidden, dtype=torch.float32, device=device)
    room = next(each for each in PAIR_CLASSES if pairs <= each)
    # In FP8, where experts have more tokens, longer tiles: their activations are then read less often.
    rows, warps = (64, 4) if scales is None or room <= FEW_TOKENS * experts else (128, 8)
    stages = (3, 5) if scales is None else (4, 4) if rows == 64 else (3, 3)
    common = {"PAIRS": room, "C": hidden, "I": size, "FP8": scales is not None, "ROWS": rows, "TOKENS": 16}
    common |= {"num_warps": warps, **dependent_launch(device)}
    x, x_scales, gate_up_scales = (x_TC, None, None) if scales is None else (*round_tokens(x_TC), scales[0])
    grid = size // rows, experts
    options = {"K": top_k, "UP_FIRST": up_first, "num_stages": stages[0], **common}
    _gate_up[grid](x, x_scales, gate_up_E2IC, gate_up_scales, ids_TK, h_AI, pairs, **options)
    h, h_scales, down_scales = (h_AI, None, None) if scales is None else (*round_tokens(h_AI), scales[1])
    grid = hidden // rows, experts
    _down[grid](h, h_scales, down_ECI, down_scales, ids_TK, weights_TK, y_AC, pairs, num_stages=stages[1], **common)
    sum_parts(y_AC.view(tokens, top_k, hidden), y_TC)
