"""The experts' MLPs for a few tokens, as matrix-vector products in two Triton kernels: no sorting, no atomics, bound by memory.

Each pair of a token and an expert streams that expert's rows. Pairs are the fastest dimension of the grid, so that tokens that share an
expert read the same rows at about the same time, and the second finds them in the L2 cache.
Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_launch import Launched, block, dependent_launch, divisor

GATE_UP_ROWS, GATE_UP_COLUMNS, GATE_UP_WARPS = 2, 1024, 8
"""How a program of the first kernel cuts its work: weight rows, columns of a load, and warps."""
DOWN_ROWS, DOWN_COLUMNS, DOWN_WARPS = 4, 256, 4
"""The same of the second. Its last load is masked, rather than all loads narrower: for experts of 1,408, loads of 128 took a third longer
than of 256."""


@triton.jit
def _load(pointers, columns, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    if SIZE % BLOCK == 0:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=columns < SIZE, other=0.0)


@Launched
@triton.jit
def _gate_up(
    x_TC,
    gate_up_E2IC,
    ids_TK,
    h_TKI,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    UP_FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """h = silu(gate(x)) * up(x) of ROWS values of one pair."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    first_IC = gate_up_E2IC + tl.load(ids_TK + pair).to(tl.int64) * (2 * I * C) + rows[:, None] * C + columns
    # x is loaded once a weight row, from the L1 cache, in the weights' own layout: cheaper than an exchange between threads.
    x_C = x_TC + (pair // K).to(tl.int64) * C + rows[:, None] * 0 + columns
    first = tl.zeros([ROWS, BLOCK], tl.float32)
    second = tl.zeros([ROWS, BLOCK], tl.float32)
    for c in tl.static_range(0, C, BLOCK):
        x = _load(x_C + c, columns + c, C, BLOCK).to(tl.float32)
        first += _load(first_IC + c, columns + c, C, BLOCK).to(tl.float32) * x
        second += _load(first_IC + I * C + c, columns + c, C, BLOCK).to(tl.float32) * x
    if UP_FIRST:
        up, gate = tl.sum(first, 1), tl.sum(second, 1)
    else:
        gate, up = tl.sum(first, 1), tl.sum(second, 1)
    tl.store(h_TKI + pair.to(tl.int64) * I + rows, gate / (1 + tl.exp(-gate)) * up)


@Launched
@triton.jit
def _down(
    h_TKI,
    down_ECI,
    ids_TK,
    weights_TK,
    y_TC,
    C: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS values of one token's output: the sum over its experts, in their order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(K):
        pair = token * K + k
        down_CI = down_ECI + tl.load(ids_TK + pair).to(tl.int64) * (C * I) + rows[:, None] * I + columns
        h_I = h_TKI + pair * I + rows[:, None] * 0 + columns
        weight = tl.load(weights_TK + pair)
        for i in tl.static_range(0, I, BLOCK):
            h = _load(h_I + i, columns + i, I, BLOCK)
            sums += _load(down_CI + i, columns + i, I, BLOCK).to(tl.float32) * (h * weight)
    tl.store(y_TC + token * C + rows, tl.sum(sums, 1))


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def moe_gemv(x_TC: Tensor, gate_up_E2IC: Tensor, down_ECI: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_first: bool) -> Tensor:
    """The experts' weighted sum y_TC, of x's dtype; products and sums are float32. `up_first`: up stands before gate in gate_up_E2IC.

    All tensors are contiguous; sums have one order, so that equal inputs give equal bits.
    """
    tokens, hidden = x_TC.shape
    size, top_k = down_ECI.shape[2], ids_TK.shape[1]
    h_TKI = torch.empty(tokens, top_k, size, dtype=torch.float32, device=x_TC.device)
    y_TC = torch.empty_like(x_TC)
    dependent = dependent_launch(x_TC.device)
    rows = divisor(size, GATE_UP_ROWS)
    _gate_up[(tokens * top_k, size // rows)](
        x_TC,
        gate_up_E2IC,
        ids_TK,
        h_TKI,
        C=hidden,
        I=size,
        K=top_k,
        UP_FIRST=up_first,
        ROWS=rows,
        BLOCK=block(hidden, GATE_UP_COLUMNS),
        num_warps=GATE_UP_WARPS,
        **dependent,
    )
    rows = divisor(hidden, DOWN_ROWS)
    _down[(tokens, hidden // rows)](
        h_TKI,
        down_ECI,
        ids_TK,
        weights_TK,
        y_TC,
        C=hidden,
        I=size,
        K=top_k,
        ROWS=rows,
        BLOCK=min(DOWN_COLUMNS, triton.next_power_of_2(size)),
        num_warps=DOWN_WARPS,
        **dependent,
    )
    return y_TC
