"""Products of a few tokens with weights in FP8, in Triton: each weight is loaded as it lies and converted in registers, so that half of the
bytes of bfloat16 are streamed. Activations are not rounded.

A block's scale is applied to the sum over its 128 columns. Shapes: T tokens, K inputs, N outputs; of experts as in `triton_moe`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_launch import Launched, dependent_launch, divisor


@triton.jit
def _scaled(weight, x, scales, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SCALES: tl.constexpr, c: tl.constexpr):
    """Products of ROWS x BLOCK weights from column c on, summed over each 128 columns and scaled: [ROWS, BLOCK / 128]."""
    columns = tl.arange(0, BLOCK)[None, :] + c
    groups = tl.arange(0, BLOCK // 128)[None, :] + c // 128
    if SIZE % BLOCK == 0:
        products = tl.load(weight + c).to(tl.float32) * tl.load(x + c).to(tl.float32)
        scale = tl.load(scales + groups)
    else:
        inside = columns < SIZE
        products = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32) * tl.load(x + c, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + groups, mask=groups < SCALES, other=0.0)
    return tl.sum(tl.reshape(products, [ROWS, BLOCK // 128, 128]), 2) * scale


@Launched
@triton.jit
def _gemv_fp8(
    x_TK,
    weight_NK,
    scales,
    y_TN,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of one token, all of one block of rows."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * ROWS
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = weight_NK + rows[:, None].to(tl.int64) * K + columns
    x = x_TK + token * K + rows[:, None] * 0 + columns  # in the weight's layout, from the L1 cache
    row_scales = scales + first // 128 * SCALES + rows[:, None] * 0
    sums = tl.zeros([ROWS, BLOCK // 128], tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        sums += _scaled(weight, x, row_scales, K, BLOCK, ROWS, SCALES, k)
    tl.store(y_TN + token * N + rows, tl.sum(sums, 1))


@custom_op(lambda x_TK, weight_NK, *rest: x_TK.new_empty(len(x_TK), len(weight_NK)))
def gemv_fp8(x_TK: Tensor, weight_NK: Tensor, scales: Tensor, rows: int = 4, columns: int = 1024, warps: int = 4) -> Tensor:
    """x W^T as y_TN, of x's dtype, summed in float32 in one order. All are contiguous."""
    (tokens, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    y_TN = torch.empty(tokens, outputs, dtype=x_TK.dtype, device=x_TK.device)
    rows = divisor(outputs, rows)
    _gemv_fp8[(tokens, outputs // rows)](
        x_TK,
        weight_NK,
        scales,
        y_TN,
        N=outputs,
        K=inputs,
        SCALES=scales.shape[1],
        ROWS=rows,
        BLOCK=columns_of(inputs, columns),
        num_warps=warps,
        **dependent_launch(x_TK.device),
    )
    return y_TN


def columns_of(size: int, limit: int) -> int:
    """How many columns to load at once: a power of two from 128 up, and a divisor where there is one."""
    even = divisor(size, limit)
    return even if even >= min(512, limit) else max(128, min(limit, 1 << (size - 1).bit_length()))


@Launched
@triton.jit
def _gate_up_fp8(
    x_TC,
    gate_up_E2IC,
    scales,
    ids_TK,
    h_TKI,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    UP_FIRST: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = silu(gate(x)) * up(x) of ROWS values of one pair."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    expert = tl.load(ids_TK + pair).to(tl.int64)
    first_IC = gate_up_E2IC + expert * (2 * I * C) + rows[:, None] * C + columns
    x_C = x_TC + (pair // K).to(tl.int64) * C + rows[:, None] * 0 + columns
    first_scales = scales + (expert * (2 * I // 128) + start // 128) * SCALES + rows[:, None] * 0
    first = tl.zeros([ROWS, BLOCK // 128], tl.float32)
    second = tl.zeros([ROWS, BLOCK // 128], tl.float32)
    for c in tl.static_range(0, C, BLOCK):
        first += _scaled(first_IC, x_C, first_scales, C, BLOCK, ROWS, SCALES, c)
        second += _scaled(first_IC + I * C, x_C, first_scales + I // 128 * SCALES, C, BLOCK, ROWS, SCALES, c)
    if UP_FIRST:
        up, gate = tl.sum(first, 1), tl.sum(second, 1)
    else:
        gate, up = tl.sum(first, 1), tl.sum(second, 1)
    tl.store(h_TKI + pair.to(tl.int64) * I + rows, gate / (1 + tl.exp(-gate)) * up)


@Launched
@triton.jit
def _down_fp8(
    h_TKI,
    down_ECI,
    scales,
    ids_TK,
    weights_TK,
    y_TC,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS values of one token's output: the sum over its experts, in their order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * ROWS
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([ROWS, BLOCK // 128], tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        expert = tl.load(ids_TK + pair).to(tl.int64)
        down_CI = down_ECI + expert * (C * I) + rows[:, None] * I + columns
        h_I = h_TKI + pair * I + rows[:, None] * 0 + columns
        expert_scales = scales + (expert * ROW_SCALES + start // 128) * (I // 128) + rows[:, None] * 0
        weight = tl.load(weights_TK + pair)
        for i in tl.static_range(0, I, BLOCK):
            sums += _scaled(down_CI, h_I, expert_scales, I, BLOCK, ROWS, I // 128, i) * weight
    tl.store(y_TC + token * C + rows, tl.sum(sums, 1))


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def moe_gemv_fp8(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    gate_up_scales: Tensor,
    down_ECI: Tensor,
    down_scales: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    up_first: bool,
    gate_up_rows: int = 2,
    down_rows: int = 4,
) -> Tensor:
    """The experts' weighted sum y_TC, of x's dtype; products and sums are float32. `up_first`: up stands before gate in gate_up_E2IC.

    All tensors are contiguous, and I is a multiple of 128; sums have one order, so that equal inputs give equal bits.
    """
    tokens, hidden = x_TC.shape
    size, top_k = down_ECI.shape[2], ids_TK.shape[1]
    h_TKI = torch.empty(tokens, top_k, size, dtype=torch.float32, device=x_TC.device)
    y_TC = torch.empty_like(x_TC)
    dependent = dependent_launch(x_TC.device)
    rows = divisor(size, gate_up_rows)
    _gate_up_fp8[(tokens * top_k, size // rows)](
        x_TC,
        gate_up_E2IC,
        gate_up_scales,
        ids_TK,
        h_TKI,
        C=hidden,
        I=size,
        K=top_k,
        UP_FIRST=up_first,
        SCALES=gate_up_scales.shape[2],
        ROWS=rows,
        BLOCK=columns_of(hidden, 2048),
        num_warps=4,
        **dependent,
    )
    rows = divisor(hidden, down_rows)
    _down_fp8[(tokens, hidden // rows)](
        h_TKI,
        down_ECI,
        down_scales,
        ids_TK,
        weights_TK,
        y_TC,
        C=hidden,
        I=size,
        K=top_k,
        ROW_SCALES=down_scales.shape[1],
        ROWS=rows,
        BLOCK=columns_of(size, 256),
        num_warps=4,
        **dependent,
    )
    return y_TC
