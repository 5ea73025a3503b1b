"""Experts for many tokens, such as a prefill's, in Triton: products of tiles, of up to 128 tokens.

The pairs of a token and an expert are listed by expert, and each expert's are cut into tiles. A program multiplies a tile with ROWS rows of
the expert's weights; the last tile of an expert is computed as the half or the quarter of one where its pairs fit. The weight's rows stand
where Hopper's instruction has 64, the tokens where it has any multiple of 8. Weights in FP8 are multiplied with activations in FP8.
Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size, A = T K pairs, N tiles.
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

MOST_PAIRS = 65536
"""Of a launch, whose memory grows with them."""
ROWS = 128
"""Of a weight, in a program: for gate and up half of them each."""
TOKENS, BLOCK, STAGES = 128, 64, (3, 3)
"""Of a tile; columns of a load; and loads that are under way, of gate and up, and of down: what fits into the 99 KiB of sm_89 and sm_120,
and twice into Hopper's shared memory."""
FP8_TOKENS, FP8_BLOCK, FP8_STAGES = 64, 128, (3, 4)
"""The same for FP8, where the columns of a load share a scale, and its product takes registers beside the sums."""


@triton.jit
def _product(weight_RB, scales_R, x_TB, scales_T, exists_T, LENGTH: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """The sums y_RT over LENGTH columns, of which the first BLOCK are given, and of the scales the first."""
    y_RT = tl.zeros([weight_RB.shape[0], x_TB.shape[0]], tl.float32)
    for block in range(LENGTH // BLOCK):
        if FP8:
            scales_RT = tl.load(scales_R + block)[:, None] * tl.load(scales_T + block)[None, :]
            x_BT = tl.trans(tl.load(x_TB + block * BLOCK, mask=exists_T[:, None], other=0.0))
            y_RT += tl.dot(tl.load(weight_RB + block * BLOCK), x_BT) * scales_RT
        else:
            x_BT = tl.trans(tl.load(x_TB + block * BLOCK, mask=exists_T[:, None], other=0.0))
            y_RT = tl.dot(tl.load(weight_RB + block * BLOCK), x_BT, y_RT)
    return y_RT


@triton.jit
def _multiply_tile(
    x,
    x_scales,
    weight,
    scales,
    pairs_A,
    weights_A,
    y_A,
    expert,
    left,
    OUTPUTS: tl.constexpr,
    LENGTH: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """For the first TOKENS of pairs_A, of which `left` are there."""
    HALVES: tl.constexpr = 2 if GATED else 1
    PART: tl.constexpr = ROWS // HALVES
    start, row = tl.program_id(0) * PART, tl.arange(0, ROWS)
    rows_R = expert.to(tl.int64) * (HALVES * OUTPUTS) + row // PART * OUTPUTS + start + row % PART
    place = tl.arange(0, TOKENS)
    exists = place < left
    pair = tl.load(pairs_A + place, mask=exists, other=0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    weight_RB, x_TB = weight + rows_R[:, None] * LENGTH + columns, x + (pair // SHARED)[:, None] * LENGTH + columns
    if FP8:
        scales_R, scales_T = scales + rows_R // 128 * (LENGTH // 128), x_scales + pair // SHARED * (LENGTH // 128)
        y = _product(weight_RB, scales_R, x_TB, scales_T, exists, LENGTH, FP8, BLOCK)
    else:
        y = _product(weight_RB, scales, x_TB, x_scales, exists, LENGTH, FP8, BLOCK)
    if GATED:
        first, second = tl.split(tl.permute(tl.reshape(y, [2, PART, TOKENS]), [1, 2, 0]))
        if UP_FIRST:
            up, gate = first, second
        else:
            gate, up = first, second
        y = gate / (1 + tl.exp(-gate)) * up
    else:
        y *= tl.load(weights_A + pair)[None, :]
    outputs = start + tl.arange(0, PART)
    tl.store(y_A + pair[:, None] * OUTPUTS + outputs[None, :], tl.trans(y), mask=exists[:, None])


@Launched
@triton.jit(do_not_specialize=["pairs"])
def _multiply(
    x,
    x_scales,
    weight,
    scales,
    pairs_EA,
    counts_E,
    tiles_N2,
    weights_A,
    y_A,
    pairs,
    OUTPUTS: tl.constexpr,
    LENGTH: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    UP_FIRST: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y = silu(gate(x)) * up(x) where it is GATED, else the weighted product: for the pairs of a tile as many outputs as ROWS of the weight
    give. SHARED pairs have the same x."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(tiles_N2 + tl.program_id(1) * 2)
    begin = tl.load(tiles_N2 + tl.program_id(1) * 2 + 1)
    left = tl.load(counts_E + expert) - begin
    pairs_A = pairs_EA + expert.to(tl.int64) * pairs + begin
    for halved in tl.static_range(3):  # the whole tile, a half, a quarter
        fewer = (TOKENS >> halved) // 2 if halved < 2 else 0
        if (left > fewer) & ((halved == 0) | (left <= TOKENS >> halved)):
            _multiply_tile(
                x,
                x_scales,
                weight,
                scales,
                pairs_A,
                weights_A,
                y_A,
                expert,
                left,
                OUTPUTS,
                LENGTH,
                SHARED,
                GATED,
                UP_FIRST,
                FP8,
                ROWS,
                TOKENS >> halved,
                BLOCK,
            )


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def moe_tiled(x_TC: Tensor, gate_up_E2IC: Tensor, down_ECI: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_first: bool) -> Tensor:
    """The experts' weighted sum y_TC, of x's dtype; sums are float32, and what is between the products, and each expert's output, is of x's
    dtype. `up_first`: up stands before gate in gate_up_E2IC.

    All tensors are contiguous, C and I multiples of 128; sums have one order.
    """
    launch = partial(_launch, gate_up_E2IC, down_ECI, up_first, None)
    return in_parts(launch, MOST_PAIRS, x_TC, ids_TK, weights_TK)


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def moe_tiled_fp8(
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
    fp8 = scales is not None
    tile, block, stages = (FP8_TOKENS, FP8_BLOCK, FP8_STAGES) if fp8 else (TOKENS, BLOCK, STAGES)
    pairs, device, dependent = tokens * top_k, x_TC.device, dependent_launch(x_TC.device)
    pairs_EA, counts_E, tiles_N2 = list_pairs(ids_TK, experts, tile)
    h_AI = torch.empty(pairs, size, dtype=x_TC.dtype, device=device)
    y_AC = torch.empty(pairs, hidden, dtype=x_TC.dtype, device=device)
    lists, tiles = (pairs_EA, counts_E, tiles_N2, weights_TK), pairs // tile + experts
    common = {"UP_FIRST": up_first, "FP8": fp8, "ROWS": ROWS, "TOKENS": tile, "BLOCK": block, "num_warps": 4, **dependent}
    x, x_scales, gate_up_scales = (x_TC, None, None) if scales is None else (*round_tokens(x_TC), scales[0])
    sizes = {"OUTPUTS": size, "LENGTH": hidden, "SHARED": top_k, "GATED": True, "num_stages": stages[0]}
    _multiply[(2 * size // ROWS, tiles)](x, x_scales, gate_up_E2IC, gate_up_scales, *lists, h_AI, pairs, **sizes, **common)
    h, h_scales, down_scales = (h_AI, None, None) if scales is None else (*round_tokens(h_AI), scales[1])
    sizes = {"OUTPUTS": hidden, "LENGTH": size, "SHARED": 1, "GATED": False, "num_stages": stages[1]}
    _multiply[(hidden // ROWS, tiles)](h, h_scales, down_ECI, down_scales, *lists, y_AC, pairs, **sizes, **common)
    sum_parts(y_AC.view(tokens, top_k, hidden), y_TC)
