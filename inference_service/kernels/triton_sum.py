"""Sums over parts, such as those of a product that is split, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.triton_launch import Launched, dependent_launch, divisor


@Launched
@triton.jit
def _sum(y_TKC, y_TC, C: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK columns of one token."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        total += tl.load(y_TKC + (token * K + k) * C + column)
    tl.store(y_TC + token * C + column, total)


def sum_parts(y_TKC: Tensor, y_TC: Tensor) -> None:
    """Write each token's sum over its K parts, in their order; sums are float32, and all is contiguous."""
    tokens, parts, columns = y_TKC.shape
    block = divisor(columns, 512)
    _sum[(tokens, columns // block)](y_TKC, y_TC, C=columns, K=parts, BLOCK=block, num_warps=4, **dependent_launch(y_TC.device))
