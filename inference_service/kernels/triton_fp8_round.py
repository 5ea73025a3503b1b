"""Activations rounded to E4M3, with a scale for each 128 of a token's, in Triton: what the tensor cores multiply with weights in FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inference_service.kernels.triton_launch import Launched, dependent_launch

GROUPS = 8
"""Of 128 values: what a program rounds."""


@triton.jit
def rounded(x_RB):
    """Rows of 128 values in E4M3, and the scales that restore them, one a row. A row of zeros has the scale of 1e-30."""
    values = x_RB.to(tl.float32)
    scales_R = tl.maximum(tl.max(tl.abs(values), 1), 1e-30) / 448.0
    return (values / scales_R[:, None]).to(tl.float8e4nv), scales_R


@Launched
@triton.jit
def _round(x_TC, y_TC, scales_TG, C: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """GROUPS times 128 values of one token."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    values, scales = rounded(tl.load(x_TC + token * C + columns, mask=columns < C, other=0.0))
    tl.store(y_TC + token * C + columns, values, mask=columns < C)
    tl.store(scales_TG + token * (C // 128) + groups, scales, mask=groups < C // 128)


def round_tokens(x_TC: Tensor) -> tuple[Tensor, Tensor]:
    """x in E4M3, and float32 scales of [T, C / 128]. x is contiguous, C a multiple of 128."""
    tokens, hidden = x_TC.shape
    y_TC = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=x_TC.device)
    scales_TG = torch.empty(tokens, hidden // 128, dtype=torch.float32, device=x_TC.device)
    grid = tokens, triton.cdiv(hidden, GROUPS * 128)
    _round[grid](x_TC, y_TC, scales_TG, C=hidden, GROUPS=GROUPS, num_warps=4, **dependent_launch(x_TC.device))
    return y_TC, scales_TG
