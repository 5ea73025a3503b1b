"""The decoder that all families share: embedding, layers of attention and MLP around one residual stream, norm, LM head.

Shapes: T tokens, C hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_service.kernels.attention import StepLayout
from inference_service.kernels.attention_mixed import StepAttention
from inference_service.models.config import ModelConfig
from inference_service.models.layers import Attention, Build, Linear, Mlp, StepContext
from inference_service.models.rotary import rotary_table


@dataclass
class DecoderLayer:
    """One layer. Its input norm takes the residual of the layer before."""

    input_norm_C: Tensor
    attention: Attention
    post_attention_norm_C: Tensor
    mlp: Mlp

    def weights(self) -> dict[str, Tensor]:
        norms = {"input_layernorm.weight": self.input_norm_C, "post_attention_layernorm.weight": self.post_attention_norm_C}
        return norms | _prefixed("self_attn.", self.attention.weights()) | _prefixed("mlp.", self.mlp.weights())

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()


class Decoder:
    """A model of any family; `make_mlp` makes the MLP of a layer, by index. A loader fills `weights()`, which start uninitialized."""

    def __init__(self, build: Build, config: ModelConfig, make_mlp: Callable[[int], Mlp]) -> None:
        self.config, self.operators, self.dtype = config, build.operators, build.dtype
        self.embedding_VC = build.empty(config.vocab_size, config.hidden_size)
        self.layers = [
            DecoderLayer(build.empty(config.hidden_size), Attention(build, config), build.empty(config.hidden_size), make_mlp(index))
            for index in range(config.layers)
        ]
        self.norm_C = build.empty(config.hidden_size)
        self.head = Linear(build, {"lm_head": 0 if config.tied_embeddings else config.vocab_size}, config.hidden_size)
        if config.tied_embeddings:
            self.head.weight = self.embedding_VC
        self.rotary_PD = rotary_table(config.rope, config.head_dim, config.max_context, build.device)

    def weights(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint goes, by name."""
        views = {"model.embed_tokens.weight": self.embedding_VC, "model.norm.weight": self.norm_C}
        for index, layer in enumerate(self.layers):
            views |= _prefixed(f"model.layers.{index}.", layer.weights())
        return views if self.config.tied_embeddings else views | self.head.weights()

    def pack(self) -> None:
        """After loading: let the operators lay the weights out anew, one at a time."""
        for layer in self.layers:
            layer.pack()
        self.head.pack()

    def forward(
        self, token_ids_T: Tensor, layout: StepLayout, caches: list[Tensor], logits_R: Tensor | None, mixed: bool = False
    ) -> Tensor:
        """Compute a step, append its keys and values to `caches` (one kv_P2HSD a layer), and give logits_RV in the model's dtype.

        `logits_R` are the tokens (indices into T) whose logits are wanted; None: all. `mixed`: attend by the one kernel for whole
        steps, which knows of the layout its tensors alone, so that a CUDA graph can hold a step with prefill chunks.
        """
        return self.logits(self.hidden(token_ids_T, layout, caches, logits_R, mixed))

    def logits(self, hidden_RC: Tensor) -> Tensor:
        """logits_RV of what `hidden` gave. Apart, since those of a long prompt are too large to make all at once."""
        return self.head(hidden_RC) if len(hidden_RC) else hidden_RC.new_empty(0, self.config.vocab_size)

    def hidden(self, token_ids_T: Tensor, layout: StepLayout, caches: list[Tensor], logits_R: Tensor | None, mixed: bool = False) -> Tensor:
        """The same up to the head's input, hidden_RC."""
        norm, eps = self.operators.norm, self.config.rms_norm_eps
        attention: StepAttention = self.operators.attention_mixed if mixed else self.operators.attention
        step = StepContext(
            self.operators.kv_append.plan(layout, caches[0], self.rotary_PD),
            attention,
            attention.plan(layout, caches[0], self.config.heads),
        )
        residual_TC = self.embedding_VC.index_select(0, token_ids_T)
        x_TC: Tensor | None = None
        for layer, kv_P2HSD in zip(self.layers, caches, strict=True):
            if x_TC is None:
                x_TC = norm.rms_norm(residual_TC, layer.input_norm_C, eps)
            else:
                x_TC = norm.add_rms_norm(x_TC, residual_TC, layer.input_norm_C, eps)
            x_TC = layer.attention(x_TC, kv_P2HSD, step)
            x_TC = layer.mlp(norm.add_rms_norm(x_TC, residual_TC, layer.post_attention_norm_C, eps))
        assert x_TC is not None
        if logits_R is not None:
            if not len(logits_R):
                return x_TC[:0]
            x_TC, residual_TC = x_TC.index_select(0, logits_R), residual_TC.index_select(0, logits_R)
        return norm.add_rms_norm(x_TC, residual_TC, self.norm_C, eps)

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> list[Tensor]:
        """An empty cache, kv_P2HSD a layer. Zeroed, since masked slots are multiplied by 0 and must be finite."""
        shape = (pages, 2, self.config.kv_heads, page_size, self.config.head_dim)
        return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.layers]


def _prefixed(prefix: str, views: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: view for name, view in views.items()}
