"""The table of rotary angles."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inference_service.models.config import RopeConfig


def rotary_table(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """table_PD, float32: for each position the cosines of the D/2 angles, then their sines."""
    frequencies = _frequencies(rope, head_dim).to(device)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position, for each pair of dimensions."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    # llama3: keep angles that turn often within the original context, slow those that turn seldom, and blend between.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope.factor)
