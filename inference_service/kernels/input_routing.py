"""Llama 4's routing: each token goes to its one best expert, whose weight, a sigmoid, scales the expert's input rather than its output.

Shapes: T tokens, E experts, C hidden size.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class InputRouting(Protocol):
    """The best expert, and its input."""

    def __call__(self, logits_TE: Tensor, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """int32 ids_T1, and y_TC = x sigmoid(best logit), of x's dtype, which the expert takes in x's place with a weight of 1."""
        ...


class TorchInputRouting:
    """Plain tensor operations."""

    def __call__(self, logits_TE: Tensor, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        best_T1, ids_T1 = logits_TE.float().max(dim=-1, keepdim=True)
        return ids_T1.int(), (x_TC * best_T1.sigmoid()).to(x_TC.dtype)


class TritonInputRouting:
    """One launch, a program a token. Of equal experts the lower id is taken."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_input_routing

        self._route: Any = triton_input_routing.route_input

    def __call__(self, logits_TE: Tensor, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        ids_T1, y_TC = self._route(logits_TE, x_TC)
        return ids_T1, y_TC
