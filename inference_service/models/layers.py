"""The parts of a decoder layer, each with its weights fused and its operators given.

Each part's `weights()` maps checkpoint names to views of its own memory, into which a loader copies.
Shapes: T tokens, C hidden size, H query heads, N query, key and value heads together, D head dim, E experts, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_service.kernels.kv_append import HeadNorms
from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, MoeConfig
from inference_service.models.experts import experts
from inference_service.models.linear import Linear, linear


@dataclass(frozen=True)
class StepContext:
    """What the layers of one step share that attend alike: the operators' plans, and by which operator it attends."""

    kv_append: Any
    mixed: bool
    """Whether it attends by the one kernel for whole steps."""
    attention_plan: Any


class Part(Protocol):
    """A piece of the model that holds weights."""

    def weights(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint goes, by name."""
        ...

    def pack(self) -> None:
        """Let the operators lay the loaded weights out anew; the views of `weights()` end here."""
        ...


class Mlp(Part, Protocol):
    """What follows attention in a layer."""

    def __call__(self, x_TC: Tensor) -> Tensor: ...


class RmsNorm:
    """A norm over the hidden size."""

    def __init__(self, build: Build, config: ModelConfig, name: str) -> None:
        self.name = name
        self.operator, self.eps, self.zero_centered = build.operators.norm, config.rms_norm_eps, config.zero_centered_norms
        self.weight_C = build.empty(config.hidden_size)

    def weights(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight_C}

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.operator.rms_norm(x_TC, self.weight_C, self.eps, self.zero_centered)

    def add(self, x_TC: Tensor | None, residual_TC: Tensor) -> Tensor:
        """Add x to the residual, in place, and give the residual's norm. None: there is nothing to add yet."""
        if x_TC is None:
            return self(residual_TC)
        return self.operator.add_rms_norm(x_TC, residual_TC, self.weight_C, self.eps, self.zero_centered)


class Attention:
    """Grouped-query attention over the paged cache, with the heads normed where the family does so."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        self.operators, self.config = build.operators, config
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        if config.fused_checkpoint:
            parts = {"qkv_proj": q_size + 2 * kv_size}
        self.qkv = linear(build, parts, config.hidden_size, config.attention_bias)
        self.output = linear(build, {"o_proj": config.hidden_size}, q_size, config.output_bias)
        self.norms = None
        if config.qk_norm:
            self.norms = HeadNorms(build.empty(config.head_dim), build.empty(config.head_dim), config.rms_norm_eps)
        self.projection_norms = (build.empty(q_size), build.empty(kv_size)) if config.projection_norm else None
        self.sinks_H = build.empty(config.heads) if config.sinks else None

    def weights(self) -> dict[str, Tensor]:
        pair = (self.norms.q_D, self.norms.k_D) if self.norms else self.projection_norms
        norms = dict(zip(("q_norm.weight", "k_norm.weight"), pair, strict=True)) if pair else {}
        sinks = {} if self.sinks_H is None else {"sinks": self.sinks_H}
        return self.qkv.weights() | self.output.weights() | norms | sinks

    def pack(self) -> None:
        self._pair_rotated()
        self.qkv.pack()
        self.output.pack()
        if self.norms and self.config.zero_centered_norms:
            # In float32, since half precision has fewer digits for 1 + w than for w.
            self.norms = HeadNorms(1 + self.norms.q_D.float(), 1 + self.norms.k_D.float(), self.norms.eps)

    def __call__(self, x_TC: Tensor, kv_P2HSD: Tensor, step: StepContext) -> Tensor:
        qkv_TN = self.qkv(x_TC)
        if self.projection_norms:
            self._norm_projections(qkv_TN, *self.projection_norms)
        qkv_TND = qkv_TN.view(len(x_TC), -1, self.config.head_dim)
        q_THD = self.operators.kv_append(qkv_TND, self.norms, kv_P2HSD, step.kv_append)
        attention = self.operators.attention_mixed if step.mixed else self.operators.attention
        return self.output(attention(q_THD, kv_P2HSD, step.attention_plan, self.sinks_H).flatten(1))

    def _norm_projections(self, qkv_TN: Tensor, q_norm: Tensor, k_norm: Tensor) -> None:
        q, k, _ = qkv_TN.tensor_split((len(q_norm), len(q_norm) + len(k_norm)), dim=1)
        for part, norm in ((q, q_norm), (k, k_norm)):
            part.copy_(self.operators.norm.rms_norm(part, norm, self.config.rms_norm_eps))

    def _pair_rotated(self) -> None:
        """Where a part of each head is rotated, let the two of each rotated pair be D/2 apart, as in heads that are rotated whole. Kernels
        know only these: the scores do not depend on the order, and what is not rotated turns by 0."""
        size, rotated = self.config.head_dim, self.config.rope.rotated(self.config.head_dim)
        if rotated == size:
            return
        low, high, rest = torch.arange(size).tensor_split((rotated // 2, rotated))
        order_D = torch.cat((low, rest[: len(rest) // 2], high, rest[len(rest) // 2 :]))
        heads = torch.arange(self.config.heads + self.config.kv_heads)
        self.qkv.reorder((heads[:, None] * size + order_D).flatten())


class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, build: Build, config: ModelConfig, size: int) -> None:
        gemm = build.operators.gemm
        self.activate = {"silu": gemm.silu_and_mul, "gelu_pytorch_tanh": gemm.gelu_tanh_and_mul}[config.activation]
        parts = {"gate_up_proj": 2 * size} if config.fused_checkpoint else {"gate_proj": size, "up_proj": size}
        self.gate_up = linear(build, parts, config.hidden_size, config.mlp_bias)
        self.down = linear(build, {"down_proj": config.hidden_size}, size, config.mlp_bias)

    def weights(self) -> dict[str, Tensor]:
        return self.gate_up.weights() | self.down.weights()

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x_TC)))


class SparseMlp:
    """Experts, each a gated MLP, of which a router chooses some for each token; and in some families one that is shared by all tokens."""

    def __init__(self, build: Build, config: ModelConfig, moe: MoeConfig) -> None:
        self.routing, self.config = build.operators.routing, moe
        self.grouped_routing = build.operators.grouped_routing
        hidden_size, gates = config.hidden_size, {"gate": moe.experts}
        self.shared = None
        if moe.shared_size:
            if moe.shared_gated:
                # Its gate reads what the router reads, and so is one more row of that product.
                gates["shared_expert_gate"] = 1
            self.shared = GatedMlp(build, config, moe.shared_size)
        self.router = Linear(build, gates, hidden_size)
        self.bias_E: Tensor | None = None
        """Added to scores when experts are chosen."""
        if moe.grouped and moe.grouped.sigmoid:
            self.bias_E = torch.empty(moe.experts, dtype=torch.float32, device=build.device)
        self.experts = experts(build, moe, hidden_size)
        self.chosen_TK: Tensor | None = None
        """Each token's experts in the step computed last. A CUDA graph writes them anew as long as somebody holds on to the tensor."""

    def weights(self) -> dict[str, Tensor]:
        views = self.router.weights() | self.experts.weights()
        if self.bias_E is not None:
            views["gate.e_score_correction_bias"] = self.bias_E
        if self.shared:
            views |= prefixed("shared_expert." if self.config.shared_gated else "shared_experts.", self.shared.weights())
        return views

    def pack(self) -> None:
        self.router.pack()
        if self.shared:
            self.shared.pack()
        self.experts.pack()

    def __call__(self, x_TC: Tensor) -> Tensor:
        gates_TE = self.router(x_TC)
        ids_TK, weights_TK = self._route(gates_TE[:, : self.config.experts])
        if not torch.compiler.is_compiling():
            self.chosen_TK = ids_TK
        y_TC = self.experts(x_TC, ids_TK, weights_TK)
        if self.shared and self.config.shared_gated:
            y_TC.addcmul_(self.shared(x_TC), gates_TE[:, -1:].sigmoid())
        elif self.shared:
            y_TC.add_(self.shared(x_TC))
        return y_TC

    def _route(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.grouped:
            return self.grouped_routing(logits_TE, self.bias_E, self.config.grouped)
        return self.routing(logits_TE, self.config.top_k, self.config.renormalize)


def dense_mlps(build: Build, config: ModelConfig) -> Callable[[int], Mlp]:
    """Makes the MLP of a layer, by index: the same in all."""
    return lambda index: GatedMlp(build, config, config.intermediate_size)


def sparse_mlps(build: Build, config: ModelConfig) -> Callable[[int], Mlp]:
    """Makes the MLP of a layer, by index: experts in the layers that `config.moe` names, else dense."""
    moe, dense = config.moe, dense_mlps(build, config)
    assert moe is not None
    return lambda index: SparseMlp(build, config, moe) if index in moe.layers else dense(index)


def prefixed(prefix: str, views: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under longer names."""
    return {prefix + name: view for name, view in views.items()}
