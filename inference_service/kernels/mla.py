"""Multi-head latent attention (MLA): the cache holds one latent and one rotated key a token, which all heads share.

Two forms give the same. Absorbed: queries pass W_UK and attend to the latents as these are, as multi-query attention whose values are
a part of its keys; what comes out passes W_UV. Expanded: the keys and values of all heads are made from the latents first.

Shapes: T tokens, H heads, L a latent's size, N and R a head's dimensions that are not rotated and that are, Q = N + R, V a value's size,
K tokens of context, P pages, S slots. A layer's cache is kv_P11SD, as any kv_P2HSD, with one key head and no values: D is L, then R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, SplitPlan, StepLayout


@dataclass(frozen=True)
class LatentShape:
    """The sizes L, N, R and V."""

    latent: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class UpProjection:
    """W_UK and W_UV of each head, its N + V rows of L."""

    weight_HXL: Tensor
    nope: int

    def absorb(self, q_THN: Tensor) -> Tensor:
        """q_THL, which attends to latents; a view of what lies head by head."""
        return torch.bmm(q_THN.transpose(0, 1), self.weight_HXL[:, : self.nope]).transpose(0, 1)

    def values(self, o_THL: Tensor, o_THV: Tensor) -> None:
        """Write the values of attended latents into `o_THV`."""
        torch.bmm(o_THL.transpose(0, 1), self.weight_HXL[:, self.nope :].transpose(1, 2), out=o_THV.transpose(0, 1))

    def expand(self, kv_KD: Tensor) -> tuple[Tensor, Tensor]:
        """k_KHQ and v_KHV of latents with their rotated keys."""
        heads, rows, latent = self.weight_HXL.shape
        kv_KHX = F.linear(kv_KD[:, :latent], self.weight_HXL.flatten(0, 1)).view(-1, heads, rows)
        k_KHN, v_KHV = kv_KHX.tensor_split((self.nope,), dim=-1)
        k_KHR = kv_KD[:, None, latent:].expand(-1, heads, -1)
        return torch.cat((k_KHN, k_KHR), dim=-1), v_KHV


class LatentAttention(Protocol):
    """Causal attention in the absorbed form, of a step's decode rows or whichever rows a backend is for."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        """What the layers of one step share; as in `attention.Attention`. `spec` has its scale, since D is no head's size."""
        ...

    def __call__(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, plan: Any, o_THL: Tensor) -> None:
        """Write the attended latents into `o_THL`. All three may be strided; their last dimensions are not."""
        ...


class HostPlanned:
    """What plans on the host even where a CUDA graph holds it, and so anew for each replay."""

    def plan_replay(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> None:
        """Queue the plan of a step before the graph of its sizes is captured or replayed on the current stream.

        The page table has a row for each that the graph computes, `contexts` those of the step's own, the first of them. `plan` of
        the step that is captured gives what was planned here.
        """
        raise NotImplementedError


class MlaPrefill(Protocol):
    """Causal attention of a step's prefill rows, in either form."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        """What the layers of one step share."""
        ...

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: Any, up: UpProjection, o_THV: Tensor) -> None:
        """Write the output into `o_THV`. Each token sees its row's context up to itself, which is in the cache already."""
        ...


class StepMla(Protocol):
    """Attention of a whole step."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        """What the layers of one step share."""
        ...

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: Any, up: UpProjection) -> Tensor:
        """The output o_THV, contiguous."""
        ...


class AbsorbedRows:
    """Attention of the rows that a backend is for, in the absorbed form; so any backend of latents can serve prefills."""

    def __init__(self, attend: LatentAttention) -> None:
        self._attend = attend

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        return self._attend.plan(layout, kv_P11SD, heads, spec)

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: Any, up: UpProjection, o_THV: Tensor) -> None:
        q_THN, q_THR = q_THQ.tensor_split((up.nope,), dim=-1)
        q_THL = up.absorb(q_THN)
        o_THL = torch.empty_like(q_THL)
        self._attend(q_THL, q_THR, kv_P11SD, plan, o_THL)
        up.values(o_THL, o_THV)


class AbsorbedStep:
    """The same of a whole step, by a backend that is for all rows."""

    def __init__(self, attend: LatentAttention) -> None:
        self._rows = AbsorbedRows(attend)

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        return self._rows.plan(layout, kv_P11SD, heads, spec)

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: Any, up: UpProjection) -> Tensor:
        o_THV = empty_output(q_THQ, up)
        self._rows(q_THQ, kv_P11SD, plan, up, o_THV)
        return o_THV


class SplitMla:
    """Attention of a whole step: decode rows absorbed, prefill rows as their backend does."""

    def __init__(self, decode: LatentAttention, prefill: MlaPrefill) -> None:
        self.decode, self.prefill = AbsorbedRows(decode), prefill
        self.host_planned = decode if isinstance(decode, HostPlanned) else None
        """What is to be planned before a CUDA graph of decodes is replayed."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> SplitPlan:
        return SplitPlan(
            layout.decodes,
            self.decode.plan(layout, kv_P11SD, heads, spec) if layout.decodes else None,
            self.prefill.plan(layout, kv_P11SD, heads, spec) if layout.decodes < len(layout.lengths) else None,
        )

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: SplitPlan, up: UpProjection) -> Tensor:
        o_THV, decodes = empty_output(q_THQ, up), plan.decodes
        if plan.decode is not None:
            self.decode(q_THQ[:decodes], kv_P11SD, plan.decode, up, o_THV[:decodes])
        if plan.prefill is not None:
            self.prefill(q_THQ[decodes:], kv_P11SD, plan.prefill, up, o_THV[decodes:])
        return o_THV


def empty_output(q_THQ: Tensor, up: UpProjection) -> Tensor:
    return q_THQ.new_empty(*q_THQ.shape[:2], up.weight_HXL.shape[1] - up.nope)
