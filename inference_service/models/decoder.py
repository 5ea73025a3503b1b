"""The decoder that all families share: embedding, layers of attention and MLP around one residual stream, norm, LM head.

Shapes: T tokens, C hidden size, V vocabulary, R rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from types import MappingProxyType

import torch
from torch import Tensor

from inference_service.kernels.attention import StepLayout
from inference_service.kernels.attention_torch import soft_capped
from inference_service.kernels.kv_append import KvAppend
from inference_service.kernels.mla_append import MlaAppend
from inference_service.kernels.selection import MlaOperators, Operators
from inference_service.models.build import Build
from inference_service.models.config import ModelConfig
from inference_service.models.layers import Attention, Mlp, RmsNorm, SparseMlp, StepContext, prefixed
from inference_service.models.linear import Linear
from inference_service.models.mla import MlaAttention
from inference_service.models.rotary import rotary_table


class DecoderLayer:
    """One layer. `kind` is the index of the way in which it attends."""

    def __init__(self, build: Build, config: ModelConfig, mlp: Mlp, kind: int) -> None:
        self.attention: Attention | MlaAttention = MlaAttention(build, config, config.mla) if config.mla else Attention(build, config)
        self.mlp, self.kind = mlp, kind
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            RmsNorm(build, config, name) if name else None for name in astuple(config.norms)
        )

    def weights(self) -> dict[str, Tensor]:
        norms: dict[str, Tensor] = {}
        for norm in (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp):
            norms |= norm.weights() if norm else {}
        return norms | prefixed("self_attn.", self.attention.weights()) | prefixed("mlp.", self.mlp.weights())

    def pack(self) -> None:
        self.attention.pack()
        self.mlp.pack()

    def __call__(self, x_TC: Tensor | None, residual_TC: Tensor, kv_P2HSD: Tensor, step: StepContext) -> Tensor:
        """Add x_TC, what the layer before gave, to the residual; and give what is to be added next."""
        x_TC = self.attention(_add(x_TC, residual_TC, self.before_attention), kv_P2HSD, step)
        if self.after_attention:
            x_TC = self.after_attention(x_TC)
        x_TC = self.mlp(_add(x_TC, residual_TC, self.before_mlp))
        return self.after_mlp(x_TC) if self.after_mlp else x_TC


class Decoder:
    """A model of any family; `make_mlp` makes the MLP of a layer, by index. A loader fills `weights()`, which start uninitialized.

    `renamed`: what the checkpoint calls parts of tensors' names.
    """

    def __init__(
        self, build: Build, config: ModelConfig, make_mlp: Callable[[int], Mlp], renamed: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.config, self.operators, self.dtype, self.renamed = config, build.operators, build.dtype, renamed
        self.embedding_VC = build.empty(config.vocab_size, config.hidden_size)
        kinds = [config.attention_of(layer) for layer in range(config.layers)]
        self.kinds = list(dict.fromkeys(kinds))
        """The ways in which layers attend."""
        self.layers = [DecoderLayer(build, config, make_mlp(layer), self.kinds.index(kind)) for layer, kind in enumerate(kinds)]
        self.norm = RmsNorm(build, config, "model.norm")
        self.head = Linear(build, {"lm_head": 0 if config.tied_embeddings else config.vocab_size}, config.hidden_size)
        if config.tied_embeddings:
            self.head.weight = self.embedding_VC
        self.rotary_PD = {rope: rotary_table(rope, config.rotary_dim, config.max_context, build.device) for _, rope in self.kinds}
        # Rounded as the embedding is.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=build.dtype).item()

    def weights(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint goes, by name."""
        views = {"model.embed_tokens.weight": self.embedding_VC} | self.norm.weights()
        for index, layer in enumerate(self.layers):
            views |= prefixed(f"model.layers.{index}.", layer.weights())
        if not self.config.tied_embeddings:
            views |= self.head.weights()
        return {self._checkpoint_name(name): view for name, view in views.items()}

    def _checkpoint_name(self, name: str) -> str:
        for ours, theirs in self.renamed.items():
            name = name.replace(ours, theirs)
        return name

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
        if not len(hidden_RC):
            return hidden_RC.new_empty(0, self.config.vocab_size)
        logits_RV = self.head(hidden_RC)
        return logits_RV if self.config.logits_soft_cap is None else soft_capped(logits_RV, self.config.logits_soft_cap)

    def hidden(self, token_ids_T: Tensor, layout: StepLayout, caches: list[Tensor], logits_R: Tensor | None, mixed: bool = False) -> Tensor:
        """The same up to the head's input, hidden_RC."""
        steps = self._plan(layout, caches[0], mixed)
        residual_TC = self.embedding_VC.index_select(0, token_ids_T)
        if self.embedding_scale != 1.0:
            residual_TC.mul_(self.embedding_scale)
        x_TC: Tensor | None = None
        for layer, kv_P2HSD in zip(self.layers, caches, strict=True):
            x_TC = layer(x_TC, residual_TC, kv_P2HSD, steps[layer.kind])
        assert x_TC is not None
        if logits_R is not None:
            if not len(logits_R):
                return x_TC[:0]
            x_TC, residual_TC = x_TC.index_select(0, logits_R), residual_TC.index_select(0, logits_R)
        return self.norm.add(x_TC, residual_TC)

    def _plan(self, layout: StepLayout, kv_P2HSD: Tensor, mixed: bool) -> list[StepContext]:
        """A step's plans for each way to attend."""
        operators, heads = self.operators, self.config.heads
        append: KvAppend | MlaAppend = operators.mla.append if self.config.mla else operators.kv_append
        appends = {rope: append.plan(layout, kv_P2HSD, table_PD) for rope, table_PD in self.rotary_PD.items()}
        kinds: Operators | MlaOperators = operators.mla if self.config.mla else operators
        attention = kinds.attention_mixed if mixed else kinds.attention
        return [StepContext(appends[rope], mixed, attention.plan(layout, kv_P2HSD, heads, spec)) for spec, rope in self.kinds]

    def take_chosen_experts(self) -> list[Tensor]:
        """ids_TK of each layer with experts, as the last `forward` chose them; they are forgotten here."""
        sparse = [layer.mlp for layer in self.layers if isinstance(layer.mlp, SparseMlp)]
        chosen = [mlp.chosen_TK for mlp in sparse if mlp.chosen_TK is not None]
        for mlp in sparse:
            mlp.chosen_TK = None
        return chosen

    def new_cache(self, pages: int, page_size: int, device: torch.device, dtype: torch.dtype | None = None) -> list[Tensor]:
        """An empty cache, kv_P2HSD a layer, of the model's dtype where none is given. Zeroed, since not every kernel passes over what lies
        beyond a context: some multiply it by 0, and it must be finite."""
        shape = pages, *self.config.page_shape(page_size)
        return [torch.zeros(shape, dtype=dtype or self.dtype, device=device) for _ in self.layers]


def _add(x_TC: Tensor | None, residual_TC: Tensor, norm: RmsNorm | None) -> Tensor:
    """Add x to the residual, in place, and give the residual, normed where there is a norm. None: there is nothing to add yet."""
    if norm:
        return norm.add(x_TC, residual_TC)
    return residual_TC if x_TC is None else residual_TC.add_(x_TC)
