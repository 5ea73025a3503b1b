"""Weights in FP8: E4M3 values, and a float32 scale for each block of 128 x 128 that restores them; activations stay as they are.

Shapes: T tokens, K inputs, N outputs, C hidden size, E experts, I an expert's intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.moe import TorchMoe

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of E4M3's values."""
BLOCK = 128


@dataclass(frozen=True)
class BlockFp8:
    """A matrix, or one an expert. Blocks at the ends may be cut off."""

    values: Tensor
    """[..., N, K] in E4M3."""
    scales: Tensor
    """[..., N / 128, K / 128], rounded up."""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The plain matrix: products in float32, then rounded to `dtype`."""
        rows, columns = self.values.shape[-2:]
        scales = self.scales.repeat_interleave(BLOCK, -2)[..., :rows, :].repeat_interleave(BLOCK, -1)[..., :columns]
        return self.values.to(torch.float32).mul_(scales).to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of FP8 as what can be indexed everywhere; other tensors as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == E4M3 else tensor


def saturated(tensor: Tensor) -> Tensor:
    """In E4M3, what is too large as the largest value."""
    return tensor.clamp(-LARGEST, LARGEST).to(E4M3)


def blocks(size: int) -> int:
    """How many blocks hold so many rows or columns."""
    return -(-size // BLOCK)


def quantize(weight_NK: Tensor) -> BlockFp8:
    """Rounded to FP8. The largest value of a block becomes E4M3's largest; the error is at most 1/16 of a value, or 2^-10 of the scale."""
    rows, columns = weight_NK.shape
    padded = F.pad(weight_NK.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocked = padded.view(blocks(rows), BLOCK, blocks(columns), BLOCK)
    scales = (blocked.abs().amax((1, 3)) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    values = (blocked / scales[:, None, :, None]).view(padded.shape)
    return BlockFp8(saturated(values[:rows, :columns]), scales)


class Fp8Gemm(Protocol):
    """y = x W^T, with W in FP8."""

    def __call__(self, x_TK: Tensor, weight: BlockFp8) -> Tensor:
        """The product y_TN, of x's dtype. K is a multiple of 128, N of 64."""
        ...


class Fp8Moe(Protocol):
    """`moe.Moe` with weights in FP8: SiLU-gated, without biases."""

    halves: tuple[str, str]
    """In which order gate and up stand in gate_up_E2IC. I is a multiple of 128."""

    def __call__(self, x_TC: Tensor, gate_up: BlockFp8, down: BlockFp8, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' outputs y_TC."""
        ...


class TorchFp8Gemm:
    """The reference: the plain matrix is made anew for each product."""

    def __call__(self, x_TK: Tensor, weight: BlockFp8) -> Tensor:
        return F.linear(x_TK, weight.dequantize(x_TK.dtype))


class TorchFp8Moe:
    """The reference."""

    halves = ("gate", "up")

    def __call__(self, x_TC: Tensor, gate_up: BlockFp8, down: BlockFp8, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return TorchMoe()(x_TC, gate_up.dequantize(x_TC.dtype), down.dequantize(x_TC.dtype), ids_TK, weights_TK)


def dequantized() -> None:
    """No operator: weights are made plain when they are loaded, and computed with as any others."""
