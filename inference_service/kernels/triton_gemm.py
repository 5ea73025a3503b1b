"""Products of a few tokens with a weight in Triton: bound by memory, so each weight row is streamed once.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_launch import Launched, block, dependent_launch, divisor


@Launched
@triton.jit
def _gemv(
    x_TK,
    weight_NK,
    bias_N,
    y_TN,
    N: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of one token; the inputs are split over the block's warps. Tokens are the fastest dimension: they share the L2 cache."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = weight_NK + rows[:, None].to(tl.int64) * K + columns
    x = x_TK + token * K + rows[:, None] * 0 + columns  # in the weight's layout, from the L1 cache: no exchange between threads
    sums = tl.zeros([ROWS, BLOCK], tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        if K % BLOCK == 0:
            sums += tl.load(weight + k).to(tl.float32) * tl.load(x + k).to(tl.float32)
        else:
            inside = columns + k < K
            sums += tl.load(weight + k, mask=inside, other=0.0).to(tl.float32) * tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    y = tl.sum(sums, 1)
    if BIAS:
        y += tl.load(bias_N + rows).to(tl.float32)
    tl.store(y_TN + token * N + rows, y)


@custom_op(lambda x_TK, weight_NK, bias_N, *tiles: x_TK.new_empty(len(x_TK), len(weight_NK)))
def gemv(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, rows: int = 4, columns: int = 512, warps: int = 4) -> Tensor:
    """x W^T + b as y_TN, of x's dtype, summed in float32 in one order. x and the weight are contiguous."""
    (tokens, inputs), outputs = x_TK.shape, weight_NK.shape[0]
    y_TN = torch.empty(tokens, outputs, dtype=x_TK.dtype, device=x_TK.device)
    rows = divisor(outputs, rows)
    _gemv[(tokens, outputs // rows)](
        x_TK,
        weight_NK,
        x_TK if bias_N is None else bias_N,
        y_TN,
        N=outputs,
        K=inputs,
        BIAS=bias_N is not None,
        ROWS=rows,
        BLOCK=block(inputs, columns),
        num_warps=warps,
        **dependent_launch(x_TK.device),
    )
    return y_TN
