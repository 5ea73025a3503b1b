"""DeepSeek's routing: experts stand in groups, the best groups are chosen first, and the experts among these.

Shapes: T tokens, E experts, G groups, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupedSpec:
    """How a model's routers choose."""

    experts: int
    top_k: int
    groups: int
    top_groups: int
    """How many groups are kept; `groups`: all, as where there are no groups."""
    sigmoid: bool
    """DeepSeek-V3's: scores are sigmoids, experts are chosen by score + bias, and groups by the sum of their best two. Else V2's: scores
    are a softmax, and groups are chosen by their best."""
    renormalize: bool
    """Whether the weights of a token are scaled to sum to 1 before `scale`."""
    scale: float


class GroupedRouting(Protocol):
    """Scores, then the best groups, then the K best of their experts."""

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None, spec: GroupedSpec) -> tuple[Tensor, Tensor]:
        """int32 ids_TK, and in float32 weights_TK: their scores without the bias, scaled. `bias_E` is float32, and there if
        `spec.sigmoid`."""
        ...


class TorchGroupedRouting:
    """Plain tensor operations."""

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None, spec: GroupedSpec) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.float()
        scores_TE = logits_TE.sigmoid() if spec.sigmoid else logits_TE.softmax(dim=-1)
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if spec.top_groups < spec.groups:
            choice_TGE = choice_TE.view(len(logits_TE), spec.groups, spec.experts // spec.groups)
            group_TG = choice_TGE.topk(2).values.sum(-1) if spec.sigmoid else choice_TGE.amax(-1)
            dropped_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, group_TG.topk(spec.top_groups).indices, False)
            choice_TE = choice_TGE.masked_fill(dropped_TG.unsqueeze(-1), float("-inf")).flatten(1)
        ids_TK = choice_TE.topk(spec.top_k).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        if spec.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return ids_TK.int(), weights_TK * spec.scale


class TritonGroupedRouting:
    """One launch, a warp a token. Of equal experts or groups the lower one is taken."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_grouped_routing

        self._route: Any = triton_grouped_routing.route_grouped

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None, spec: GroupedSpec) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = self._route(
            logits_TE, bias_E, spec.top_k, spec.groups, spec.top_groups, spec.sigmoid, spec.renormalize, spec.scale
        )
        return ids_TK, weights_TK


class FlashInferGroupedRouting:
    """`flashinfer.fused_moe.fused_topk_deepseek`, which is V3's alone."""

    def __init__(self) -> None:
        from inference_service.kernels import flashinfer_ops

        self._route: Any = flashinfer_ops.fused_topk_deepseek

    def __call__(self, logits_TE: Tensor, bias_E: Tensor | None, spec: GroupedSpec) -> tuple[Tensor, Tensor]:
        # Weights come in the logits' dtype.
        weights_TK, ids_TK = self._route(logits_TE.float(), bias_E, spec.groups, spec.top_groups, spec.top_k, spec.scale)
        return ids_TK, weights_TK
