"""The reference of paged attention, in plain tensor operations.

Shapes as in `attention`, and L tokens of context, Q tokens of a chunk, G query heads that share a KV head, N pairs of row and KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import PLAIN, AttentionSpec, StepLayout
from inference_service.kernels.fp8 import as_bytes


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows that attend in one batched product, padded to the longest."""

    rows_B: Tensor | None
    """Their rows; None: all decode rows."""
    blocks: Tensor
    """Which [S, D] blocks of the cache to gather, ordered [2, B, H, M]; [1, B, H, M] where keys are their own values."""
    beyond: Tensor
    """Which of the gathered rows of D values lie beyond a context. They are whatever an earlier request left, even NaN, which a weight of 0
    would let through."""
    mask_B1L: Tensor
    """0 where a row's token sees, else -inf."""
    spec: AttentionSpec


class TorchDecode:
    """Gathers the rows' pages, as far as the window goes, then one batched product for rows of like length."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> list[DecodeGroup]:
        device, page_size, block_2H1 = kv_P2HSD.device, kv_P2HSD.shape[3], _block_offsets(kv_P2HSD)
        contexts = layout.contexts[: layout.decodes]
        first_pages = [_first_page(context - 1, spec, page_size) for context in contexts]
        lengths = [context - first * page_size for context, first in zip(contexts, first_pages, strict=True)]
        plan = []
        for group in _group_decodes(lengths):
            rows = None if len(group) == layout.decodes else torch.tensor(group, device=device)
            pages = -(-max(lengths[row] for row in group) // page_size)
            # From numbers of the host, so that nothing here waits for the device.
            contexts_B1 = torch.tensor([contexts[row] for row in group]).unsqueeze(1)
            first_B1 = torch.tensor([first_pages[row] for row in group]).unsqueeze(1)
            positions_BL = first_B1 * page_size + torch.arange(pages * page_size)
            beyond_BL = positions_BL >= contexts_B1
            hidden_BL = beyond_BL if spec.window is None else beyond_BL | (positions_BL < contexts_B1 - spec.window)
            mask_BL = torch.zeros(hidden_BL.shape).masked_fill_(hidden_BL, float("-inf"))
            beyond_2BHL = beyond_BL.unsqueeze(1).expand(kv_P2HSD.shape[1], -1, kv_P2HSD.shape[2], -1)
            beyond = beyond_2BHL.flatten().nonzero().squeeze(1)

            pages_BM = layout.pages_RM[: layout.decodes] if rows is None else layout.pages_RM[rows]
            index_BM = (first_B1 + torch.arange(pages)).clamp_(max=pages_BM.shape[1] - 1)
            blocks_B2HM = pages_BM.gather(1, index_BM.to(device)).view(-1, 1, 1, pages) * block_2H1.numel() + block_2H1
            blocks = blocks_B2HM.transpose(0, 1).flatten()
            plan.append(DecodeGroup(rows, blocks, beyond.to(device), mask_BL.unsqueeze(1).to(device), spec))
        return plan

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: list[DecodeGroup], o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        for group in plan:
            if group.rows_B is None:
                o_THD.copy_(_decode(q_THD, kv_P2HSD, group, sinks_H))
            else:
                o_THD[group.rows_B] = _decode(q_THD[group.rows_B], kv_P2HSD, group, sinks_H).to(o_THD.dtype)


@dataclass(frozen=True)
class Chunk:
    """One prefill row."""

    tokens: slice
    blocks: Tensor
    """Ordered [2, H, M]."""
    length: int
    """Of the context, L, from the first page that is gathered."""
    mask_QL: Tensor | None
    """What each token sees. None: the chunk is the whole context, and plain causal attention does."""
    spec: AttentionSpec


class TorchPrefill:
    """Gathers each row's pages, as far as the window goes, then one attention call a row."""

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> list[Chunk]:
        page_size, block_2H1 = kv_P2HSD.shape[3], _block_offsets(kv_P2HSD)
        plain = spec.soft_cap is None and spec.window is None
        chunks, first = [], 0
        for row in range(layout.decodes, len(layout.lengths)):
            length, context = layout.lengths[row], layout.contexts[row]
            first_page = _first_page(context - length, spec, page_size)
            pages_M = layout.pages_RM[row, first_page : -(-context // page_size)]
            visible = context - first_page * page_size
            mask_QL = None
            if length < context or not plain:
                mask_QL = torch.ones(length, visible, dtype=torch.bool, device=kv_P2HSD.device).tril_(visible - length)
                if spec.window is not None:
                    mask_QL.triu_(visible - length - spec.window + 1)
            blocks = (pages_M * block_2H1.numel() + block_2H1).flatten()
            chunks.append(Chunk(slice(first, first + length), blocks, visible, mask_QL, spec))
            first += length
        return chunks

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: list[Chunk], o_THD: Tensor, sinks_H: Tensor | None = None) -> None:
        for chunk in plan:
            o_THD[chunk.tokens] = _prefill(q_THD[chunk.tokens], kv_P2HSD, chunk, sinks_H)


def _first_page(position: int, spec: AttentionSpec, page_size: int) -> int:
    """The first page that a token at `position` looks into."""
    return 0 if spec.window is None else max(position - spec.window + 1, 0) // page_size


def _block_offsets(kv_P2HSD: Tensor) -> Tensor:
    """Where the [S, D] blocks of a page stand after its first."""
    parts, heads = kv_P2HSD.shape[1:3]
    return torch.arange(parts * heads, device=kv_P2HSD.device).view(parts, heads, 1)


def _group_decodes(contexts: list[int]) -> list[list[int]]:
    """All rows at once, unless padding to the longest would more than double the work; then rows of like length together."""
    if max(contexts) * len(contexts) <= 2 * sum(contexts):
        return [list(range(len(contexts)))]
    groups: dict[int, list[int]] = {}
    for row, context in enumerate(contexts):
        groups.setdefault(context.bit_length(), []).append(row)
    return list(groups.values())


def gather(kv_P2HSD: Tensor, blocks: Tensor) -> Tensor:
    """[S, D] blocks of the cache, one after the other."""
    page_size, head_dim = kv_P2HSD.shape[-2:]
    return as_bytes(kv_P2HSD).view(-1, page_size * head_dim).index_select(0, blocks).view(kv_P2HSD.dtype)


def _decode(q_BHD: Tensor, kv_P2HSD: Tensor, group: DecodeGroup, sinks_H: Tensor | None) -> Tensor:
    """Query heads that share a KV head become the rows of one matrix. Scores and sums are float32 whatever the dtype."""
    batch, _, head_dim = q_BHD.shape
    kv_heads, length = kv_P2HSD.shape[2], group.mask_B1L.shape[-1]
    gathered = gather(kv_P2HSD, group.blocks).view(-1, head_dim)
    as_bytes(gathered).index_fill_(0, group.beyond, 0)
    kv_2NLD = gathered.view(-1, batch * kv_heads, length, head_dim).float()
    k_NLD, v_NLD = kv_2NLD[0], kv_2NLD[-1]
    q_NGD = (q_BHD.float() * group.spec.scale_for(head_dim)).view(batch * kv_heads, -1, head_dim)
    scores_NGL = soft_capped(torch.bmm(q_NGD, k_NLD.transpose(1, 2)), group.spec.soft_cap)
    scores_NGL.view(batch, -1, length).add_(group.mask_B1L)
    sinks_NG1 = None if sinks_H is None else sinks_H.view(kv_heads, -1, 1).repeat(batch, 1, 1)
    return torch.bmm(softmax(scores_NGL, sinks_NG1), v_NLD).view(q_BHD.shape)


def _prefill(q_QHD: Tensor, kv_P2HSD: Tensor, chunk: Chunk, sinks_H: Tensor | None) -> Tensor:
    (_, heads, head_dim), kv_heads, spec = q_QHD.shape, kv_P2HSD.shape[2], chunk.spec
    k_HLD, v_HLD = gather(kv_P2HSD, chunk.blocks).view(2, kv_heads, -1, head_dim)[:, :, : chunk.length].to(q_QHD.dtype)
    q_HQD = q_QHD.transpose(0, 1)
    if spec.soft_cap is None and sinks_H is None:
        o_1HQD = F.scaled_dot_product_attention(
            q_HQD.unsqueeze(0),
            k_HLD.unsqueeze(0),
            v_HLD.unsqueeze(0),
            attn_mask=chunk.mask_QL,
            is_causal=chunk.mask_QL is None,
            scale=spec.scale,
            enable_gqa=True,
        )
        return o_1HQD[0].transpose(0, 1)
    q_HGQD = (q_HQD.float() * spec.scale_for(head_dim)).reshape(kv_heads, -1, *q_HQD.shape[1:])
    scores_HGQL = soft_capped(q_HGQD @ k_HLD.float().transpose(1, 2).unsqueeze(1), spec.soft_cap)
    if chunk.mask_QL is None:
        hidden_QL = torch.ones(scores_HGQL.shape[2:], dtype=torch.bool, device=q_QHD.device).triu_(1)
    else:
        hidden_QL = ~chunk.mask_QL
    sinks_HGQ1 = None if sinks_H is None else sinks_H.view(kv_heads, -1, 1, 1).expand(*scores_HGQL.shape[:3], 1)
    weights_HGQL = softmax(scores_HGQL.masked_fill_(hidden_QL, float("-inf")), sinks_HGQ1)
    o_HGQD: Tensor = weights_HGQL @ v_HLD.float().unsqueeze(1)
    return o_HGQD.view(heads, -1, head_dim).transpose(0, 1).to(q_QHD.dtype)


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(scores / cap), in place."""
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights over the last dimension; `sinks` [..., 1] are one more score, whose weight is dropped."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(torch.cat((scores, sinks.to(scores.dtype)), dim=-1), dim=-1)[..., :-1]
