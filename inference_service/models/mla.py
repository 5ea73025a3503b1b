"""Multi-head latent attention over the paged cache of latents, with its weights.

Shapes: T tokens, C hidden size, H heads, L a latent's size, N and R a head's dimensions that are not rotated and that are, Q = N + R,
V a value's size, X = N + V, D = L + R.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_service.kernels.mla import UpProjection
from inference_service.models.build import Build
from inference_service.models.config import MlaConfig, ModelConfig
from inference_service.models.layers import StepContext
from inference_service.models.linear import Fp8Linear, Linear, linear

EPS = 1e-6
"""Of the norms within, whatever the model's."""


class MlaAttention:
    """Queries, and one latent with one rotated key for all heads; each head's keys and values are made from the latent."""

    def __init__(self, build: Build, config: ModelConfig, mla: MlaConfig) -> None:
        self.operators, self.config, self.mla = build.operators, config, mla
        sizes, q_size = mla.sizes, config.heads * config.head_dim
        compressed = {"kv_a_proj_with_mqa": sizes.latent + sizes.rope}
        self.query: Linear | Fp8Linear | None = None
        if mla.query_rank:
            self.input = linear(build, {"q_a_proj": mla.query_rank} | compressed, config.hidden_size)
            self.query = linear(build, {"q_b_proj": q_size}, mla.query_rank)
            self.query_norm = build.empty(mla.query_rank)
        else:
            self.input = linear(build, {"q_proj": q_size} | compressed, config.hidden_size)
        self.norm_L = build.empty(sizes.latent)
        # Not a Linear: the absorbed form multiplies by its parts.
        self.up = UpProjection(build.empty(config.heads, sizes.nope + sizes.value, sizes.latent), sizes.nope)
        self.output = linear(build, {"o_proj": config.hidden_size}, config.heads * sizes.value)

    def weights(self) -> dict[str, Tensor]:
        views = self.input.weights() | self.output.weights()
        views |= {"kv_a_layernorm.weight": self.norm_L, "kv_b_proj.weight": self.up.weight_HXL.flatten(0, 1)}
        return views | (self.query.weights() | {"q_a_layernorm.weight": self.query_norm} if self.query else {})

    def pack(self) -> None:
        if self.mla.interleaved:
            self._pair_rotated()
        self.input.pack()
        self.output.pack()
        if self.query:
            self.query.pack()

    def __call__(self, x_TC: Tensor, kv_P11SD: Tensor, step: StepContext) -> Tensor:
        mla, (latent, rope) = self.operators.mla, (self.mla.sizes.latent, self.mla.sizes.rope)
        q_T, kv_TD = self.input(x_TC).tensor_split((-latent - rope,), dim=-1)
        if self.query:
            q_T = self.query(self.operators.norm.rms_norm(q_T, self.query_norm, EPS, False))
        q_THQ = q_T.view(len(x_TC), self.config.heads, self.config.head_dim)
        mla.append(q_THQ, kv_TD, self.norm_L, EPS, kv_P11SD, step.kv_append)
        attention = mla.attention_mixed if step.mixed else mla.attention
        return self.output(attention(q_THQ, kv_P11SD, step.attention_plan, self.up).flatten(1))

    def _pair_rotated(self) -> None:
        """Let the two of each rotated pair be R/2 apart instead of side by side: scores do not depend on the order."""
        rope, size = self.mla.sizes.rope, self.config.head_dim
        order_R = torch.arange(rope).view(-1, 2).T.flatten()
        rows = torch.arange(sum(self.input.outputs.values()))
        query_rows = torch.arange(self.config.heads * size)
        queries = query_rows if self.query else rows[: len(query_rows)]
        for rotated in (queries.view(-1, size)[:, -rope:], rows[None, -rope:]):
            rotated.copy_(rotated[:, order_R])
        self.input.reorder(rows)
        if self.query:
            self.query.reorder(queries)
