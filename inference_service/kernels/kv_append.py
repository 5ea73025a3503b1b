"""From the fused QKV product to what attention reads: norm the heads, rotate them, and write keys and values into their pages.

Shapes: T tokens, N query, key and value heads together, H query or KV heads, D head dim; the cache is kv_P2HSD.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import StepLayout
from inference_service.kernels.fp8 import E4M3, as_bytes, saturated
from inference_service.kernels.rope import rotate, rotations


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query head and each key head."""

    q_D: Tensor
    k_D: Tensor
    eps: float


class KvAppend(Protocol):
    """Norms and rotates the query and key heads, and appends keys and values to the cache. A token at position -1 appends nothing."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, table_PD: Tensor) -> Any:
        """What the layers of one step share. `kv_P2HSD` is any layer's cache, for its shape and dtype; `table_PD` holds for each position
        the cosines of the D/2 angles, then their sines, in float32."""
        ...

    def __call__(self, qkv_TND: Tensor, norms: HeadNorms | None, kv_P2HSD: Tensor, plan: Any) -> Tensor:
        """The query q_THD; it may be a view of `qkv_TND`, which is overwritten then."""
        ...


@dataclass(frozen=True)
class TorchAppendPlan:
    """Computed once a step."""

    rotations: Tensor
    append_T2H: Tensor
    """Index of each new key's and value's row of D values in the cache."""


class TorchKvAppend:
    """Plain tensor operations, in place. Knows no padded rows: every position counts."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, table_PD: Tensor) -> TorchAppendPlan:
        _, _, heads, page_size, _ = kv_P2HSD.shape
        block_2H = torch.arange(2 * heads, device=kv_P2HSD.device).view(2, heads)
        page_T = layout.pages_RM[layout.row_T, layout.positions_T // page_size]
        blocks_T2H = page_T.view(-1, 1, 1) * (2 * heads) + block_2H
        append_T2H = blocks_T2H * page_size + (layout.positions_T % page_size).view(-1, 1, 1)
        # A cache in FP8 does not tell the model's dtype.
        dtype = torch.float32 if kv_P2HSD.dtype == E4M3 else kv_P2HSD.dtype
        return TorchAppendPlan(rotations(table_PD, layout.positions_T, dtype), append_T2H)

    def __call__(self, qkv_TND: Tensor, norms: HeadNorms | None, kv_P2HSD: Tensor, plan: TorchAppendPlan) -> Tensor:
        tokens, _, head_dim = qkv_TND.shape
        kv_heads = kv_P2HSD.shape[2]
        q_THD, qk_TND, kv_TND = qkv_TND[:, : -2 * kv_heads], qkv_TND[:, :-kv_heads], qkv_TND[:, -2 * kv_heads :]
        if norms:
            k_THD = kv_TND[:, :kv_heads]
            q_THD.copy_(F.rms_norm(q_THD.to(norms.q_D.dtype), norms.q_D.shape, norms.q_D, norms.eps))
            k_THD.copy_(F.rms_norm(k_THD.to(norms.k_D.dtype), norms.k_D.shape, norms.k_D, norms.eps))
        rotate(qk_TND, plan.rotations.to(qk_TND.dtype))
        kv_T2HD = kv_TND.view(tokens, 2, kv_heads, head_dim)
        if kv_P2HSD.dtype == E4M3:
            kv_T2HD = saturated(kv_T2HD)
        as_bytes(kv_P2HSD).view(-1, head_dim).index_put_((plan.append_T2H,), as_bytes(kv_T2HD))
        return q_THD


class TritonKvAppend:
    """One launch a layer, and nothing before it; the query is copied out contiguous, as XQA and FMHA v2 want it."""

    def __init__(self) -> None:
        from inference_service.kernels import triton_kv_append

        self._kernels = triton_kv_append

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, table_PD: Tensor) -> tuple[Tensor, ...]:
        return table_PD, layout.positions_T, layout.row_T, layout.pages_RM

    def __call__(self, qkv_TND: Tensor, norms: HeadNorms | None, kv_P2HSD: Tensor, plan: tuple[Tensor, ...]) -> Tensor:
        weights = (norms.q_D, norms.k_D, norms.eps) if norms else (None, None, 0.0)
        return self._kernels.append(qkv_TND, kv_P2HSD, *weights, *plan)
