"""Rounding to 8 bits, as the FP8 kernels want their weights."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of E4M3's values."""
BLOCK = 128
IN_BLOCKS = "blocks of 128 x 128; inputs are quantized within"
OWN_IN_BLOCKS = f"{IN_BLOCKS}, from 3 tokens on"


def to_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., N, K] in E4M3, and float32 scales [..., N / 128, K / 128] that restore it."""
    rows, columns = weight.shape[-2] // BLOCK, weight.shape[-1] // BLOCK
    blocks = weight.reshape(*weight.shape[:-2], rows, BLOCK, columns, BLOCK)
    scales = blocks.abs().amax((-3, -1), keepdim=True).float() / LARGEST
    rounded = (blocks / scales).to(E4M3)
    return rounded.flatten(-4, -3).flatten(-2, -1), scales.squeeze((-3, -1)).contiguous()


def to_tensor(values: Tensor) -> tuple[Tensor, Tensor]:
    """In E4M3, with one scale for all."""
    scale = values.abs().max().float() / LARGEST
    return (values / scale).to(E4M3), scale
