"""Mixture of experts: the gated MLPs among which `routing` chooses.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size, A = T K assignments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ClampedSwiglu:
    """GPT-OSS's experts: biases, and (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped, and alternating in gate_up."""

    gate_up_bias_E2I: Tensor
    down_bias_EC: Tensor
    alpha: float
    limit: float

    def activate(self, gate_up_A2I: Tensor) -> Tensor:
        gate_AI, up_AI = gate_up_A2I[:, 0::2], gate_up_A2I[:, 1::2]
        gate_AI = gate_AI.clamp(max=self.limit)
        return (up_AI.clamp(-self.limit, self.limit) + 1).mul_(torch.sigmoid(gate_AI * self.alpha)).mul_(gate_AI)


class Moe(Protocol):
    """The weighted sum of each token's chosen experts."""

    halves: tuple[str, str]
    """In which order gate and up stand in gate_up_E2IC; loaders write them so, since a reordered copy would double the memory."""

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        """Lay loaded weights out as this backend reads them. Called once a layer; the results are opaque."""
        ...

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        """The experts' outputs y_TC; `gate_up` and `down` are packed. Experts are SiLU-gated and without biases, or else `clamped`, which
        not every backend can."""
        ...


class TorchMoe:
    """Sorts the assignments by expert, then one grouped product a matrix."""

    halves = ("gate", "up")

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(
        self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor, clamped: ClampedSwiglu | None = None
    ) -> Tensor:
        experts, top_k = gate_up.shape[0], ids_TK.shape[1]
        expert_A, order_A = ids_TK.flatten().sort(stable=True)
        ends_E = torch.searchsorted(expert_A, torch.arange(experts, dtype=expert_A.dtype, device=x_TC.device), right=True).int()
        x_AC = x_TC[order_A // top_k]
        h_A2I = F.grouped_mm(x_AC, gate_up.transpose(1, 2), offs=ends_E)
        if clamped:
            h_AI = clamped.activate(h_A2I.add_(clamped.gate_up_bias_E2I[expert_A]))
        else:
            gate_AI, up_AI = h_A2I.chunk(2, dim=-1)
            h_AI = F.silu(gate_AI).mul_(up_AI)
        y_AC = F.grouped_mm(h_AI, down.transpose(1, 2), offs=ends_E)
        if clamped:
            y_AC.add_(clamped.down_bias_EC[expert_A])
        y_TKC = torch.empty_like(y_AC).index_copy_(0, order_A, y_AC).view(*ids_TK.shape, -1)
        return y_TKC.mul_(weights_TK.to(y_TKC.dtype).unsqueeze(-1)).sum(dim=1)
