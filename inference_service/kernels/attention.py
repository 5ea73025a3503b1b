"""Paged attention: the KV cache's layout, appending to it, and attending over it.

Shapes: T tokens of a step, R rows (requests) of a step, B decode rows, H heads, D head dim, P pages, S slots of a page, M pages of the
longest row, L tokens of context. A layer's cache is kv_P2HSD: [page, key or value, KV head, slot, head dim] ("HND").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class StepLayout:
    """Where the rows of a step stand in the cache: decodes first, one token each, then prefill chunks.

    Lists are known to the host and give the shapes; tensors are on the device and give the values.
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


class Attention(Protocol):
    """Attention of a step's queries over each row's context, itself included, causal."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor) -> Any:
        """What the layers of one step share. `kv_P2HSD` is any layer's cache, for its shape."""
        ...

    def append(self, kv_P2HSD: Tensor, kv_T2HD: Tensor, plan: Any) -> None:
        """Write the step's keys and values into their pages."""
        ...

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any) -> Tensor:
        """The output o_THD, contiguous, after `append`. Scores are scaled by 1 / sqrt(D)."""
        ...


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows that attend in one batched product, padded to the longest."""

    rows_B: Tensor | None
    """Their rows; None: all decode rows."""
    blocks: Tensor
    """Which [S, D] blocks of the cache to gather, ordered [2, B, H, M]."""
    mask_B1L: Tensor
    """0 within the context, -inf beyond."""


@dataclass(frozen=True)
class Chunk:
    """One prefill row."""

    tokens: slice
    blocks: Tensor
    """Ordered [2, H, M]."""
    context: int
    mask_QL: Tensor | None
    """None: the chunk is the whole context, and plain causal attention does."""


@dataclass(frozen=True)
class TorchPlan:
    """Indices into the cache, computed once a step."""

    append_T2H: Tensor
    """Index of each new key's and value's row of D values."""
    decodes: list[DecodeGroup]
    chunks: list[Chunk]


class TorchAttention:
    """Gathers each row's pages, then one batched product for the decodes and one attention call a prefill chunk."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor) -> TorchPlan:
        _, _, heads, page_size, _ = kv_P2HSD.shape
        block_2H1 = torch.arange(2 * heads, device=kv_P2HSD.device).view(2, heads, 1)
        page_T = layout.pages_RM[layout.row_T, layout.positions_T // page_size]
        blocks_T2H = page_T.view(-1, 1, 1) * (2 * heads) + block_2H1.squeeze(-1)
        append_T2H = blocks_T2H * page_size + (layout.positions_T % page_size).view(-1, 1, 1)

        decodes = []
        for group in _group_decodes(layout.contexts[: layout.decodes]):
            rows = None if len(group) == layout.decodes else torch.tensor(group, device=kv_P2HSD.device)
            pages = -(-max(layout.contexts[row] for row in group) // page_size)
            select = slice(0, layout.decodes) if rows is None else rows
            blocks_B2HM = layout.pages_RM[select, :pages].view(-1, 1, 1, pages) * (2 * heads) + block_2H1
            beyond = torch.arange(pages * page_size, device=kv_P2HSD.device) >= layout.contexts_R[select].unsqueeze(1)
            mask_BL = torch.zeros(beyond.shape, device=kv_P2HSD.device).masked_fill_(beyond, float("-inf"))
            decodes.append(DecodeGroup(rows, blocks_B2HM.transpose(0, 1).flatten(), mask_BL.unsqueeze(1)))

        chunks, first = [], layout.decodes
        for row in range(layout.decodes, len(layout.lengths)):
            length, context = layout.lengths[row], layout.contexts[row]
            pages_M = layout.pages_RM[row, : -(-context // page_size)]
            mask_QL = None
            if length < context:
                mask_QL = torch.ones(length, context, dtype=torch.bool, device=kv_P2HSD.device).tril_(context - length)
            chunks.append(Chunk(slice(first, first + length), (pages_M * (2 * heads) + block_2H1).flatten(), context, mask_QL))
            first += length
        return TorchPlan(append_T2H, decodes, chunks)

    def append(self, kv_P2HSD: Tensor, kv_T2HD: Tensor, plan: TorchPlan) -> None:
        kv_P2HSD.view(-1, kv_P2HSD.shape[-1]).index_put_((plan.append_T2H,), kv_T2HD)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: TorchPlan) -> Tensor:
        o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for group in plan.decodes:
            if group.rows_B is None:
                o_THD[: len(group.mask_B1L)] = _decode(q_THD[: len(group.mask_B1L)], kv_P2HSD, group)
            else:
                o_THD[group.rows_B] = _decode(q_THD[group.rows_B], kv_P2HSD, group)
        for chunk in plan.chunks:
            o_THD[chunk.tokens] = _prefill(q_THD[chunk.tokens], kv_P2HSD, chunk)
        return o_THD


def _group_decodes(contexts: list[int]) -> list[list[int]]:
    """All rows at once, unless padding to the longest would more than double the work; then rows of like length together."""
    if not contexts:
        return []
    if max(contexts) * len(contexts) <= 2 * sum(contexts):
        return [list(range(len(contexts)))]
    groups: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        groups.setdefault(context.bit_length(), []).append(row)
    return list(groups.values())


def _gather(kv_P2HSD: Tensor, blocks: Tensor) -> Tensor:
    page_size, head_dim = kv_P2HSD.shape[-2:]
    return kv_P2HSD.view(-1, page_size * head_dim).index_select(0, blocks)


def _decode(q_BHD: Tensor, kv_P2HSD: Tensor, group: DecodeGroup) -> Tensor:
    """Query heads that share a KV head become the rows of one matrix. Scores and sums are float32 whatever the dtype."""
    batch, _, head_dim = q_BHD.shape
    kv_heads, length = kv_P2HSD.shape[2], group.mask_B1L.shape[-1]
    k_NLD, v_NLD = _gather(kv_P2HSD, group.blocks).view(2, batch * kv_heads, length, head_dim).float()
    q_NGD = (q_BHD.float() * head_dim**-0.5).view(batch * kv_heads, -1, head_dim)
    scores_NGL = torch.bmm(q_NGD, k_NLD.transpose(1, 2))
    scores_NGL.view(batch, -1, length).add_(group.mask_B1L)
    return torch.bmm(torch.softmax(scores_NGL, dim=-1), v_NLD).view(q_BHD.shape)


def _prefill(q_QHD: Tensor, kv_P2HSD: Tensor, chunk: Chunk) -> Tensor:
    _, _, kv_heads, _, head_dim = kv_P2HSD.shape
    k_HLD, v_HLD = _gather(kv_P2HSD, chunk.blocks).view(2, kv_heads, -1, head_dim)[:, :, : chunk.context]
    return F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1).unsqueeze(0),
        k_HLD.unsqueeze(0),
        v_HLD.unsqueeze(0),
        attn_mask=chunk.mask_QL,
        is_causal=chunk.mask_QL is None,
        enable_gqa=True,
    )[0].transpose(0, 1)
