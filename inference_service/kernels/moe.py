"""Mixture of experts: the gated MLPs among which `routing` chooses.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size, A = T K assignments.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Moe(Protocol):
    """The weighted sum of each token's chosen experts."""

    halves: tuple[str, str]
    """In which order gate and up stand in gate_up_E2IC; loaders write them so, since a reordered copy would double the memory."""

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        """Lay loaded weights out as this backend reads them. Called once a layer; the results are opaque."""
        ...

    def __call__(self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The experts' outputs y_TC; `gate_up` and `down` are packed."""
        ...


class TorchMoe:
    """Sorts the assignments by expert, then one grouped product a matrix."""

    halves = ("gate", "up")

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        experts, top_k = gate_up.shape[0], ids_TK.shape[1]
        expert_A, order_A = ids_TK.flatten().sort(stable=True)
        ends_E = torch.searchsorted(expert_A, torch.arange(experts, dtype=expert_A.dtype, device=x_TC.device), right=True).int()
        x_AC = x_TC[order_A // top_k]
        gate_AI, up_AI = F.grouped_mm(x_AC, gate_up.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
        y_AC = F.grouped_mm(F.silu(gate_AI).mul_(up_AI), down.transpose(1, 2), offs=ends_E)
        y_TKC = torch.empty_like(y_AC).index_copy_(0, order_A, y_AC).view(*ids_TK.shape, -1)
        return y_TKC.mul_(weights_TK.to(y_TKC.dtype).unsqueeze(-1)).sum(dim=1)
