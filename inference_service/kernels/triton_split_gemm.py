"""Products of some dozens of tokens with a weight, in Triton: the sum over inputs is split among programs, so that enough of them stream
the weight; a second kernel adds the parts.

The weight's rows stand where Hopper's instruction has 64 of them, tokens where it has as few as 16. Where the weight is in FP8, activations
are rounded to E4M3 in the same kernel, with a scale for each 128 of a token's. Shapes: T tokens, K inputs, N outputs, S splits of K.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.custom_op import custom_op
from inference_service.kernels.small_gemm import SPLIT_INPUTS, SPLIT_ROWS
from inference_service.kernels.triton_fp8_round import rounded
from inference_service.kernels.triton_launch import Launched, dependent_launch, divisor
from inference_service.kernels.triton_sum import sum_parts

MOST_SPLITS = 8
SPLIT_BLOCKS, LEAST_PROGRAMS, MOST_PROGRAMS = 8, 128, 256
"""Blocks of a split, but more or fewer where there would be too many or too few programs, as far as MOST_SPLITS allows: measured best at
the shapes of Qwen3-30B-A3B, Moonlight and Llama-3.1-8B."""
WIDTHS, STAGES = (16, 32, 64), 6
"""Tokens of a program; and one more than blocks that are loaded at once, as fit into the 99 KiB of shared memory of sm_89 and sm_120."""
FP8_PROGRAMS = 320
"""To stream a weight in FP8 with: between two and three for each multiprocessor of an H200, all at once."""
FP8_ROWS, FP8_LEAST_BLOCKS = 128, 2
"""Rows of a program; and the least blocks of 128 inputs of a split, where K has them: measured best at Qwen3-30B-A3B's shapes."""
FP8_STAGES = {16: 5, 32: 4, 64: 3}
"""STAGES of FP8, by the tokens of a program."""


@Launched
@triton.jit(do_not_specialize=["tokens"])
def _gemm_split(
    x_TK,
    weight_NK,
    scales,
    bias_N,
    y_TSN,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    FP8: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of TOKENS tokens, summed over BLOCKS blocks of inputs. In FP8 a block is 128 wide; else there may be a bias."""
    first = tl.program_id(0) * ROWS
    begin = tl.program_id(1) * BLOCKS
    count = min(BLOCKS, K // BLOCK - begin)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = weight_NK + rows[:, None].to(tl.int64) * K + begin * BLOCK + columns
    x = x_TK + token[:, None].to(tl.int64) * K + begin * BLOCK + columns
    if FP8:
        row_scales = scales + first // 128 * (K // 128) + begin
        scale = tl.load(row_scales)  # while the kernel before drains, which does not write weights
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for block in range(count):
        values = tl.load(x + block * BLOCK, mask=exists[:, None], other=0.0)
        if FP8:
            values, x_scales = rounded(values)
            total += tl.dot(tl.load(weight + block * BLOCK), tl.trans(values)) * (x_scales * scale)[None, :]
            scale = tl.load(row_scales + block + 1, mask=block + 1 < count, other=0.0)
        else:
            total = tl.dot(tl.load(weight + block * BLOCK), tl.trans(values), total)
    if bias_N is not None:  # in the first of the parts
        total += tl.load(bias_N + rows, mask=begin * N + rows < N, other=0.0).to(tl.float32)[:, None]
    y = y_TSN + (token * tl.num_programs(1) + tl.program_id(1))[None, :].to(tl.int64) * N + rows[:, None]
    tl.store(y, total, mask=exists[None, :])


@custom_op(lambda x_TK, weight_NK, *rest: x_TK.new_empty(len(x_TK), len(weight_NK)))
def gemm_split(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, most_splits: int = MOST_SPLITS) -> Tensor:
    """x W^T + b as y_TN, of x's dtype; sums are float32, in one order.

    All are contiguous, N a multiple of SPLIT_ROWS and K of SPLIT_INPUTS.
    """
    (tokens, inputs), tiles = x_TK.shape, len(weight_NK) // SPLIT_ROWS
    width, blocks = _width(tokens, WIDTHS), inputs // SPLIT_INPUTS
    splits = max(min(blocks // SPLIT_BLOCKS, MOST_PROGRAMS // tiles), triton.cdiv(LEAST_PROGRAMS, tiles))
    splits = min(splits, most_splits, blocks) if tokens <= width else 1
    shape = {"BLOCKS": triton.cdiv(blocks, splits), "BLOCK": SPLIT_INPUTS, "TOKENS": width, "ROWS": SPLIT_ROWS}
    return _launch(x_TK, weight_NK, None, bias_N, STAGES, shape)


@custom_op(lambda x_TK, weight_NK, *rest: x_TK.new_empty(len(x_TK), len(weight_NK)))
def gemm_fp8_split(x_TK: Tensor, weight_NK: Tensor, scales: Tensor, most_splits: int = MOST_SPLITS) -> Tensor:
    """x W^T as y_TN, of x's dtype, with x rounded to E4M3; sums are float32, in one order. All are contiguous, K a multiple of 128.

    The scales may not be what the kernel just before writes.
    """
    (tokens, inputs), outputs = x_TK.shape, len(weight_NK)
    rows, width = divisor(outputs, FP8_ROWS), _width(tokens, FP8_STAGES)
    # With more tokens there are programs enough, and parts would take much memory.
    splits = min(most_splits, triton.cdiv(FP8_PROGRAMS, outputs // rows)) if tokens <= width else 1
    blocks = blocks_of_split(inputs // 128, splits)
    shape = {"BLOCKS": blocks, "BLOCK": 128, "TOKENS": width, "ROWS": rows}
    return _launch(x_TK, weight_NK, scales, None, min(blocks + 1, FP8_STAGES[width]), shape)


def _width(tokens: int, widths: Collection[int]) -> int:
    """How many tokens a program takes."""
    return next((width for width in widths if tokens <= width), max(widths))


def _launch(x_TK: Tensor, weight_NK: Tensor, scales: Tensor | None, bias_N: Tensor | None, stages: int, shape: dict[str, int]) -> Tensor:
    (tokens, inputs), outputs, device = x_TK.shape, len(weight_NK), x_TK.device
    y_TN = torch.empty(tokens, outputs, dtype=x_TK.dtype, device=device)
    if not tokens:
        return y_TN
    splits = triton.cdiv(inputs // shape["BLOCK"], shape["BLOCKS"])
    parts = y_TN if splits == 1 else torch.empty(tokens, splits, outputs, dtype=torch.float32, device=device)
    grid = outputs // shape["ROWS"], splits, triton.cdiv(tokens, shape["TOKENS"])
    options = {"N": outputs, "K": inputs, "FP8": scales is not None, **shape, **dependent_launch(device)}
    _gemm_split[grid](x_TK, weight_NK, scales, bias_N, parts, tokens, num_warps=4, num_stages=stages, **options)
    if splits > 1:
        sum_parts(parts, y_TN)
    return y_TN


def blocks_of_split(blocks: int, splits: int) -> int:
    """How many of FP8's blocks each of so many splits has; the last one may have fewer."""
    return min(blocks, max(FP8_LEAST_BLOCKS, -(-blocks // splits)))
