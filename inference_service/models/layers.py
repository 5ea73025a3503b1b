"""The parts of a decoder layer, each with its weights fused and its operators given.

Each part's `weights()` maps checkpoint names to views of its own memory, into which a loader copies.
Shapes: T tokens, C hidden size, H query heads, N query, key and value heads together, D head dim, E experts, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_service.kernels.attention_mixed import StepAttention
from inference_service.kernels.kv_append import HeadNorms
from inference_service.kernels.selection import Operators
from inference_service.models.config import ModelConfig, MoeConfig


@dataclass(frozen=True)
class Build:
    """With what a model is built."""

    operators: Operators
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class StepContext:
    """What the layers of one step share: the operators' plans, and by what it attends."""

    kv_append: Any
    attention: StepAttention
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


class Linear:
    """One product for all matrices of the checkpoint that read the same input, stacked in the order of `outputs`."""

    def __init__(self, build: Build, outputs: dict[str, int], inputs: int, bias: bool = False) -> None:
        self.gemm = build.operators.gemm
        self.outputs = outputs
        self.weight = build.empty(sum(outputs.values()), inputs)
        self.bias = build.empty(sum(outputs.values())) if bias else None

    def weights(self) -> dict[str, Tensor]:
        views, first = {}, 0
        for name, size in self.outputs.items():
            views[f"{name}.weight"] = self.weight[first : first + size]
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias[first : first + size]
            first += size
        return views

    def pack(self) -> None:
        self.weight = self.gemm.pack(self.weight)

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.gemm(x_TC, self.weight, self.bias)


class Attention:
    """Grouped-query attention over the paged cache, with the heads normed where the family does so."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        self.operators, self.config = build.operators, config
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = config.attention_bias
        self.qkv = Linear(build, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, config.hidden_size, bias)
        self.output = Linear(build, {"o_proj": config.hidden_size}, q_size, bias)
        self.norms = None
        if config.qk_norm:
            self.norms = HeadNorms(build.empty(config.head_dim), build.empty(config.head_dim), config.rms_norm_eps)

    def weights(self) -> dict[str, Tensor]:
        norms = {"q_norm.weight": self.norms.q_D, "k_norm.weight": self.norms.k_D} if self.norms else {}
        return self.qkv.weights() | self.output.weights() | norms

    def pack(self) -> None:
        self.qkv.pack()
        self.output.pack()

    def __call__(self, x_TC: Tensor, kv_P2HSD: Tensor, step: StepContext) -> Tensor:
        qkv_TND = self.qkv(x_TC).view(len(x_TC), -1, self.config.head_dim)
        q_THD = self.operators.kv_append(qkv_TND, self.norms, kv_P2HSD, step.kv_append)
        return self.output(step.attention(q_THD, kv_P2HSD, step.attention_plan).flatten(1))


class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        size = config.intermediate_size
        self.gemm = build.operators.gemm
        self.gate_up = Linear(build, {"gate_proj": size, "up_proj": size}, config.hidden_size, config.mlp_bias)
        self.down = Linear(build, {"down_proj": config.hidden_size}, size, config.mlp_bias)

    def weights(self) -> dict[str, Tensor]:
        return self.gate_up.weights() | self.down.weights()

    def pack(self) -> None:
        self.gate_up.pack()
        self.down.pack()

    def __call__(self, x_TC: Tensor) -> Tensor:
        return self.down(self.gemm.silu_and_mul(self.gate_up(x_TC)))


class SparseMlp:
    """Experts, each a gated MLP, of which a router chooses some for each token."""

    def __init__(self, build: Build, hidden_size: int, moe: MoeConfig) -> None:
        self.routing, self.moe, self.config = build.operators.routing, build.operators.moe, moe
        self.router = Linear(build, {"gate": moe.experts}, hidden_size)
        self.gate_up = build.empty(moe.experts, 2 * moe.intermediate_size, hidden_size)
        self.down = build.empty(moe.experts, hidden_size, moe.intermediate_size)
        self.chosen_TK: Tensor | None = None
        """Each token's experts in the step computed last. A CUDA graph writes them anew as long as somebody holds on to the tensor."""

    def weights(self) -> dict[str, Tensor]:
        views = self.router.weights()
        for expert, (gate_up_2IC, down_CI) in enumerate(zip(self.gate_up, self.down, strict=True)):
            parts = dict(zip(self.moe.halves, gate_up_2IC.chunk(2), strict=True)) | {"down": down_CI}
            # One order whatever the backend's, so that random weights do not depend on it.
            views |= {f"experts.{expert}.{name}_proj.weight": parts[name] for name in ("gate", "up", "down")}
        return views

    def pack(self) -> None:
        self.router.pack()
        self.gate_up, self.down = self.moe.pack(self.gate_up, self.down)

    def __call__(self, x_TC: Tensor) -> Tensor:
        ids_TK, weights_TK = self.routing(self.router(x_TC), self.config.top_k, self.config.renormalize)
        if not torch.compiler.is_compiling():
            self.chosen_TK = ids_TK
        return self.moe(x_TC, self.gate_up, self.down, ids_TK, weights_TK)
