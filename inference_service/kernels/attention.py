"""Paged attention: the KV cache's layout, a step's layout, and how its decode rows and prefill rows are given to a backend each.

Shapes: T tokens of a step, R rows (requests) of a step, B decode rows, H heads, D head dim, P pages, S slots of a page, M pages of the
longest row. A layer's cache is kv_P2HSD: [page, key or value, KV head, slot, head dim] ("HND"), contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepLayout:
    """Where the rows of a step stand in the cache: decodes first, one token each, then prefill chunks.

    Lists are known to the host and give the shapes; tensors are on the device and give the values. In a CUDA graph of decodes `contexts`
    mean nothing; in one that may hold prefill chunks no list does. There a padded token is the twin of a real one, has position -1 - the
    other's, and writes nothing; a padded decode row reads what the other reads.
    """

    decodes: int
    """Decode rows, B."""
    lengths: list[int]
    """Tokens a row computes; 1 for the first B."""
    contexts: list[int]
    """Tokens a row has in the cache after this step."""
    positions_T: Tensor
    row_T: Tensor
    """The row a token belongs to."""
    pages_RM: Tensor
    """A row's pages in order, padded with any page."""
    contexts_R: Tensor
    captured: bool = False
    """Whether this is a step that a CUDA graph of decodes is captured from."""


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends: what is done to the scores before their softmax, in this order."""

    scale: float | None = None
    """None: 1 / sqrt(D)."""
    soft_cap: float | None = None
    """Scores are squeezed to within it, as cap * tanh(score / cap)."""
    window: int | None = None
    """How many tokens of the context a token sees, itself included; None: all."""

    def scale_for(self, head_dim: int) -> float:
        return float(head_dim**-0.5) if self.scale is None else self.scale


PLAIN = AttentionSpec()


class Attention(Protocol):
    """Causal attention of a step's decode rows, or of its prefill rows: `q_THD` and `o_THD` are those rows' tokens alone, contiguous."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        """What the layers of one step share that attend by one `spec`. `kv_P2HSD` is any layer's cache, for its shape; `heads` are the
        query's."""
        ...

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        """Write the output into `o_THD`. Each token sees its row's context up to itself, which is in the cache already, as far as the
        window goes. `sinks_H`: one more score of each head, which takes its share of the softmax and has no value."""
        ...


@dataclass(frozen=True)
class SplitPlan:
    """Both backends' plans; None where a step has no such rows."""

    decodes: int
    decode: Any
    prefill: Any
    fused: tuple[FusedAttention, Any] | None = None
    """What attends to all rows at once, and its plan."""


class FusedAttention:
    """Attention of a whole step with decodes and chunks, in one launch that is planned on the host."""

    steps = 0
    """How many it has planned."""

    def forms(self) -> list[FusedAttention]:
        """What may launch: itself, unless it chooses among others."""
        return [self]

    def choose(self, layout: StepLayout) -> FusedAttention | None:
        """What attends to a step; None: decodes and chunks apart."""
        return self if self.serves(layout) else None

    def serves(self, layout: StepLayout) -> bool:
        """Whether a step is one that it is made for."""
        return 0 < layout.decodes < len(layout.lengths)

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        assert spec.window is None and spec.soft_cap is None
        self.steps += 1
        return self._plan(layout, kv_P2HSD, heads, spec)

    def _plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec) -> Any:
        raise NotImplementedError

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, sinks_H: Tensor | None = None) -> Tensor:
        """The output o_THD, contiguous."""
        raise NotImplementedError


class SplitAttention:
    """Attention of a whole step: one backend for its decode rows, another for its prefill rows; or `fused` for both, where it serves."""

    def __init__(self, decode: Attention, prefill: Attention, fused: FusedAttention | None = None) -> None:
        self.decode, self.prefill, self.fused = decode, prefill, fused

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> SplitPlan:
        if self.fused and (form := self.fused.choose(layout)):
            return SplitPlan(layout.decodes, None, None, (form, form.plan(layout, kv_P2HSD, heads, spec)))
        return SplitPlan(
            layout.decodes,
            self.decode.plan(layout, kv_P2HSD, heads, spec) if layout.decodes else None,
            self.prefill.plan(layout, kv_P2HSD, heads, spec) if layout.decodes < len(layout.lengths) else None,
        )

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: SplitPlan, sinks_H: Tensor | None = None) -> Tensor:
        """The output o_THD, contiguous."""
        if plan.fused is not None:
            form, planned = plan.fused
            return form(q_THD, kv_P2HSD, planned, sinks_H)
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        decodes = plan.decodes
        if plan.decode is not None:
            self.decode(q_THD[:decodes], kv_P2HSD, plan.decode, o_THD[:decodes], sinks_H)
        if plan.prefill is not None:
            self.prefill(q_THD[decodes:], kv_P2HSD, plan.prefill, o_THD[decodes:], sinks_H)
        return o_THD
