"""Routing: which experts a token goes to, and with which weights.

Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Routing(Protocol):
    """Softmax over the experts, then the K best."""

    def __call__(self, logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        """ids_TK, int32 or int64, and weights_TK in float32, scaled to sum to 1 where `renormalize`."""
        ...


class TorchRouting:
    """Plain tensor operations."""

    def __call__(self, logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = torch.softmax(logits_TE.float(), dim=-1).topk(top_k, dim=-1)
        return ids_TK.int(), weights_TK / weights_TK.sum(dim=-1, keepdim=True) if renormalize else weights_TK


class TritonRouting:
    """One launch, a warp a token; ids are int32. Of equal experts the lower id is taken."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_routing

        self._route: Any = triton_routing.route

    def __call__(self, logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = self._route(logits_TE, top_k, renormalize)
        return ids_TK, weights_TK
