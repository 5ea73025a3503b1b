"""The reference of paged attention, in plain tensor operations.

Shapes as in `attention`, and L tokens of context, Q tokens of a chunk, G query heads that share a KV head, N pairs of row and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import StepLayout


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows that attend in one batched product, padded to the longest."""

    rows_B: Tensor | None
    """Their rows; None: all decode rows."""
    blocks: Tensor
    """Which [S, D] blocks of the cache to gather, ordered [2, B, H, M]."""
    mask_B1L: Tensor
    """0 within the context, -inf beyond."""


class TorchDecode:
    """Gathers the rows' pages, then one batched product for rows of like length."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> list[DecodeGroup]:
        page_size, block_2H1 = kv_P2HSD.shape[3], _block_offsets(kv_P2HSD)
        plan = []
        for group in _group_decodes(layout.contexts[: layout.decodes]):
            rows = None if len(group) == layout.decodes else torch.tensor(group, device=kv_P2HSD.device)
            pages = -(-max(layout.contexts[row] for row in group) // page_size)
            select = slice(0, layout.decodes) if rows is None else rows
            blocks_B2HM = layout.pages_RM[select, :pages].view(-1, 1, 1, pages) * block_2H1.numel() + block_2H1
            beyond = torch.arange(pages * page_size, device=kv_P2HSD.device) >= layout.contexts_R[select].unsqueeze(1)
            mask_BL = torch.zeros(beyond.shape, device=kv_P2HSD.device).masked_fill_(beyond, float("-inf"))
            plan.append(DecodeGroup(rows, blocks_B2HM.transpose(0, 1).flatten(), mask_BL.unsqueeze(1)))
        return plan

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: list[DecodeGroup], o_THD: Tensor) -> None:
        for group in plan:
            if group.rows_B is None:
                o_THD.copy_(_decode(q_THD, kv_P2HSD, group))
            else:
                o_THD[group.rows_B] = _decode(q_THD[group.rows_B], kv_P2HSD, group)


@dataclass(frozen=True)
class Chunk:
    """One prefill row."""

    tokens: slice
    blocks: Tensor
    """Ordered [2, H, M]."""
    context: int
    mask_QL: Tensor | None
    """None: the chunk is the whole context, and plain causal attention does."""


class TorchPrefill:
    """Gathers each row's pages, then one attention call a row."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int) -> list[Chunk]:
        page_size, block_2H1 = kv_P2HSD.shape[3], _block_offsets(kv_P2HSD)
        chunks, first = [], 0
        for row in range(layout.decodes, len(layout.lengths)):
            length, context = layout.lengths[row], layout.contexts[row]
            pages_M = layout.pages_RM[row, : -(-context // page_size)]
            mask_QL = None
            if length < context:
                mask_QL = torch.ones(length, context, dtype=torch.bool, device=kv_P2HSD.device).tril_(context - length)
            blocks = (pages_M * block_2H1.numel() + block_2H1).flatten()
            chunks.append(Chunk(slice(first, first + length), blocks, context, mask_QL))
            first += length
        return chunks

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: list[Chunk], o_THD: Tensor) -> None:
        for chunk in plan:
            o_THD[chunk.tokens] = _prefill(q_THD[chunk.tokens], kv_P2HSD, chunk)


def _block_offsets(kv_P2HSD: Tensor) -> Tensor:
    """Where the [S, D] blocks of a page stand after its first."""
    heads = kv_P2HSD.shape[2]
    return torch.arange(2 * heads, device=kv_P2HSD.device).view(2, heads, 1)


def _group_decodes(contexts: list[int]) -> list[list[int]]:
    """All rows at once, unless padding to the longest would more than double the work; then rows of like length together."""
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
