"""MXFP4 weights: blocks of 32 values of 4 bits (OCP's E2M1), each with a scale that is a power of two.

A checkpoint holds NAME_blocks, [experts, outputs, inputs / 32, 16] of two values a byte, the lower bits first, and NAME_scales, [experts,
outputs, inputs / 32] of exponents plus 127, in place of NAME, [experts, inputs, outputs].
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the 4 bits mean: sign, two bits of exponent, one of mantissa."""


def plain_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor that the blocks stand for."""
    experts, outputs, groups, half = blocks
    return experts, 2 * half * groups, outputs


def dequantize_into(destination_EIO: Tensor, blocks_EOGB: Tensor, scales_EOG: Tensor) -> None:
    """Write the plain values, an expert at a time, so that there is no second copy of them all."""
    values = torch.tensor(VALUES, device=destination_EIO.device)
    for destination_IO, blocks, scales in zip(destination_EIO, blocks_EOGB, scales_EOG, strict=True):
        blocks_OGB = blocks.to(destination_EIO.device).int()
        exponents_OG1 = scales.to(destination_EIO.device).int().unsqueeze(-1) - 127
        values_OGB2 = values[torch.stack((blocks_OGB & 15, blocks_OGB >> 4), dim=-1)]
        destination_IO.copy_(torch.ldexp(values_OGB2.flatten(2), exponents_OG1).flatten(1).T)
