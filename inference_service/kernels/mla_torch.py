"""The reference of MLA, in plain tensor operations: decode rows absorbed, prefill rows expanded.

Shapes as in `mla`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import PLAIN, Attention, AttentionSpec, StepLayout
from inference_service.kernels.attention_mixed import TorchPagedAttention
from inference_service.kernels.attention_torch import Chunk, TorchDecode, TorchPrefill, gather
from inference_service.kernels.mla import AbsorbedStep, UpProjection


class TorchLatentDecode:
    """Decode rows, as multi-query attention over keys that are their own values; what comes out beyond a latent is dropped."""

    def __init__(self) -> None:
        self._attention: Attention = TorchDecode()

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        return self._attention.plan(layout, kv_P11SD, heads, spec)

    def __call__(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, plan: Any, o_THL: Tensor) -> None:
        q_THD = torch.cat((q_THL, q_THR), dim=-1)
        o_THD = torch.empty_like(q_THD)
        self._attention(q_THD, kv_P11SD, plan, o_THD)
        o_THL.copy_(o_THD[..., : o_THL.shape[-1]])


class TorchLatentPaged:
    """The same for all rows of a step, from what the device knows of them."""

    def __init__(self) -> None:
        self._attention = TorchPagedAttention()

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> Any:
        return self._attention.plan(layout, kv_P11SD, heads, spec)

    def __call__(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, plan: Any, o_THL: Tensor) -> None:
        o_THD = self._attention(torch.cat((q_THL, q_THR), dim=-1), kv_P11SD, plan)
        o_THL.copy_(o_THD[..., : o_THL.shape[-1]])


class TorchMlaPrefill:
    """Expands each row's context, then one attention call a row."""

    def plan(self, layout: StepLayout, kv_P11SD: Tensor, heads: int, spec: AttentionSpec = PLAIN) -> list[Chunk]:
        return TorchPrefill().plan(layout, kv_P11SD, heads, spec)

    def __call__(self, q_THQ: Tensor, kv_P11SD: Tensor, plan: list[Chunk], up: UpProjection, o_THV: Tensor) -> None:
        for chunk in plan:
            k_KHQ, v_KHV = up.expand(gather(kv_P11SD, chunk.blocks).view(-1, kv_P11SD.shape[-1])[: chunk.length])
            q_1HTQ, k_1HKQ, v_1HKV = (x.transpose(0, 1).unsqueeze(0) for x in (q_THQ[chunk.tokens], k_KHQ, v_KHV))
            o_1HTV = F.scaled_dot_product_attention(
                q_1HTQ,
                k_1HKQ,
                v_1HKV,
                attn_mask=chunk.mask_QL,
                is_causal=chunk.mask_QL is None,
                scale=chunk.spec.scale,
            )
            o_THV[chunk.tokens] = o_1HTV[0].transpose(0, 1)


def torch_mla_mixed() -> AbsorbedStep:
    """A whole step absorbed."""
    return AbsorbedStep(TorchLatentPaged())
