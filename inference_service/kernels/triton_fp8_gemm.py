"""Products of some dozens of tokens with a weight in FP8, in Triton, by the tensor cores' FP8 instructions.

The weight's rows stand where the instruction has 64 of them, tokens where it has as few as 16. Activations are rounded to E4M3 in the same
kernel, with a scale for each 128 of a token's. The sum over K is split among programs, so that a few hundred of them stream the weight; a
second kernel adds the parts. Shapes: T tokens, K inputs, N outputs, S splits of K.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.triton_fp8_round import rounded
from inference_service.kernels.triton_launch import dependent_launch, divisor
from inference_service.kernels.triton_sum import sum_parts

PROGRAMS = 320
"""To stream a weight with: between two and three for each multiprocessor of an H200, all at once."""
ROWS, MOST_SPLITS, LEAST_BLOCKS = 128, 8, 2
"""Rows of a program; and splits, each with so many blocks of 128 inputs where K has them: measured best at Qwen3-30B-A3B's shapes."""
STAGES = {16: 5, 32: 4, 64: 3}
"""By the tokens of a program: one more than blocks that are loaded at once, as fit into the 99 KiB of shared memory of sm_89 and sm_120."""


@triton.jit(do_not_specialize=["tokens"])
def _gemm_split(
    x_TK,
    weight_NK,
    scales,
    y_TSN,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of TOKENS tokens, summed over BLOCKS blocks of inputs."""
    first = tl.program_id(0) * ROWS
    begin = tl.program_id(1) * BLOCKS
    count = min(BLOCKS, K // 128 - begin)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, 128)[None, :]
    weight = weight_NK + rows[:, None].to(tl.int64) * K + begin * 128 + columns
    x = x_TK + token[:, None].to(tl.int64) * K + begin * 128 + columns
    row_scales = scales + first // 128 * (K // 128) + begin
    scale = tl.load(row_scales)  # while the kernel before drains, which does not write weights
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(count):
        values, x_scales = rounded(tl.load(x + block * 128, mask=exists[:, None], other=0.0))
        total += tl.dot(tl.load(weight + block * 128), tl.trans(values)) * (x_scales * scale)[None, :]
        scale = tl.load(row_scales + block + 1, mask=block + 1 < count, other=0.0)
    y = y_TSN + (token * tl.num_programs(1) + tl.program_id(1))[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(y, total, mask=exists[None, :])


@custom_op(lambda x_TK, weight_NK, *rest: x_TK.new_empty(len(x_TK), len(weight_NK)))
def gemm_fp8_split(x_TK: Tensor, weight_NK: Tensor, scales: Tensor, most_splits: int = MOST_SPLITS) -> Tensor:
    """x W^T as y_TN, of x's dtype, with x rounded to E4M3; sums are float32, in one order. All are contiguous, K a multiple of 128.

    The scales may not be what the kernel just before writes.
    """
    (tokens, inputs), outputs, device = x_TK.shape, weight_NK.shape[0], x_TK.device
    y_TN = torch.empty(tokens, outputs, dtype=x_TK.dtype, device=device)
    if not tokens:
        return y_TN
    rows, width = divisor(outputs, ROWS), next((width for width in STAGES if tokens <= width), max(STAGES))
    tiles = outputs // rows, triton.cdiv(tokens, width)
    # With more tokens there are programs enough, and parts would take much memory.
    blocks = blocks_of_split(inputs // 128, min(most_splits, triton.cdiv(PROGRAMS, tiles[0])) if tiles[1] == 1 else 1)
    splits = triton.cdiv(inputs // 128, blocks)
    parts = y_TN if splits == 1 else torch.empty(tokens, splits, outputs, dtype=torch.float32, device=device)
    _gemm_split[(tiles[0], splits, tiles[1])](
        x_TK,
        weight_NK,
        scales,
        parts,
        tokens,
        N=outputs,
        K=inputs,
        BLOCKS=blocks,
        TOKENS=width,
        ROWS=rows,
        num_warps=4,
        num_stages=min(blocks + 1, STAGES[width]),
        **dependent_launch(device),
    )
    if splits > 1:
        sum_parts(parts, y_TN)
    return y_TN


def blocks_of_split(blocks: int, splits: int) -> int:
    """How many of the blocks each of so many splits has; the last one may have fewer."""
    return min(blocks, max(LEAST_BLOCKS, -(-blocks // splits)))
