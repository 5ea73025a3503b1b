"""A model's shape, read from the config.json of a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from inference_service.kernels.attention import PLAIN, AttentionSpec
from inference_service.kernels.grouped_routing import GroupedSpec
from inference_service.kernels.mla import LatentShape
from inference_service.models.config_json import ModelError
from inference_service.models.fp8 import read_fp8
from inference_service.models.rotary import RopeConfig, read_rope

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LayerNorms:
    """What the checkpoint calls a layer's norms; None: the family has no such norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = LayerNorms()


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers' experts."""

    experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    layers: frozenset[int]
    """Which layers are sparse; the others are dense."""
    shared_size: int = 0
    """Intermediate size of the expert that every token goes to, weighted by a gate of its own; 0: there is none."""
    shared_gated: bool = True
    """False: that expert's output is added as it is."""
    clamped: tuple[float, float] | None = None
    """Alpha and limit of clamped SwiGLU, with biases. None: plain SwiGLU, without."""
    grouped: GroupedSpec | None = None
    """How the router chooses, where that is not a softmax over all experts."""

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ModelError(f"num_experts_per_tok {self.top_k} is more than the number of experts, {self.experts}")


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention."""

    sizes: LatentShape
    query_rank: int | None
    """Size of what queries are made from; None: from the hidden state itself."""
    interleaved: bool
    """Whether the checkpoint has the two of each rotated pair side by side, and not half of the rotated dimensions apart."""


@dataclass(frozen=True)
class ModelConfig:
    """All that the decoder needs to know. Sizes are numbers of elements."""

    architecture: str
    dtype: torch.dtype
    """The checkpoint's."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Of the dense layers."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    attention_bias: bool
    """Of queries, keys and values."""
    output_bias: bool
    """Of attention's output."""
    mlp_bias: bool
    activation: str = "silu"
    """Of the MLPs, as config.json names it."""
    norms: LayerNorms = PRE_NORMS
    zero_centered_norms: bool = False
    """Whether norms scale by 1 + weight."""
    embedding_scale: float = 1.0
    logits_soft_cap: float | None = None
    qk_norm: bool = False
    """Whether each query and key head is normed."""
    projection_norm: bool = False
    """Whether queries are normed over all heads together, and keys likewise."""
    fused_checkpoint: bool = False
    """Whether the checkpoint holds queries, keys and values as one matrix, and gate and up as one."""
    sinks: bool = False
    attention: AttentionSpec = PLAIN
    """Of the layers that see the whole context."""
    window: int | None = None
    """Of the other layers, in tokens."""
    sliding_layers: frozenset[int] = frozenset()
    sliding_rope: RopeConfig | None = None
    """Where it is not that of the others."""
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    """With it `kv_heads` is 1, and `head_dim` that of queries."""
    fp8: bool = False
    """Whether weights of layers are in FP8."""
    unused: tuple[str, ...] = ()
    """Beginnings of the names of tensors that a checkpoint may hold for what is not computed."""

    @property
    def rotary_dim(self) -> int:
        """The size of what `rope` rotates, or a part of it."""
        return self.mla.sizes.rope if self.mla else self.head_dim

    def page_shape(self, page_size: int) -> tuple[int, int, int, int]:
        """Of a page in a layer: keys and values, or latents with their rotated keys."""
        if self.mla:
            return 1, 1, page_size, self.mla.sizes.latent + self.mla.sizes.rope
        return 2, self.kv_heads, page_size, self.head_dim

    def attention_of(self, layer: int) -> tuple[AttentionSpec, RopeConfig]:
        """How a layer attends. A window that no context can leave is none."""
        if layer not in self.sliding_layers:
            return self.attention, self.rope
        window = self.window if self.window and self.window < self.max_context else None
        return replace(self.attention, window=window), self.sliding_rope or self.rope


def common_fields(raw: dict[str, Any], activation: str = "silu", partial_rotary: bool = False) -> dict[str, Any]:
    """The fields of ModelConfig that all families share; `activation` is the one that the family has, and `partial_rotary` says whether it
    may rotate a part of each head alone. Raises ModelError, which names the field."""
    _refuse(raw, activation)
    rope = read_rope(raw)
    if rope.partial != 1 and not partial_rotary:
        raise ModelError(f"partial_rotary_factor {rope.partial} is not supported in this architecture; supported is 1")
    heads = integer(raw, "num_attention_heads")
    hidden_size = integer(raw, "hidden_size")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    kv_heads = integer(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = integer(raw, "head_dim", hidden_size // heads)
    if rope.short_factor and {len(rope.short_factor), len(rope.long_factor)} != {pairs := rope.rotated(head_dim) // 2}:
        raise ModelError(f"rope scaling {rope.kind!r}: short_factor and long_factor must have {pairs} entries each")
    return {
        "architecture": raw["architectures"][0],
        "dtype": DTYPES[dtype],
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": integer(raw, "intermediate_size"),
        "layers": integer(raw, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_context": integer(raw, "max_position_embeddings"),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": rope,
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "output_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "activation": activation,
        "fp8": read_fp8(raw),
    }


def moe_fields(raw: dict[str, Any], layers: int) -> MoeConfig:
    """The experts as the Qwen families write them. Raises ModelError, which names the field."""
    every, dense = integer(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if raw.get("use_sliding_window"):
        raise ModelError("use_sliding_window: sliding windows are not supported in this architecture")
    return MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=frozenset(index for index in range(layers) if index not in dense and (index + 1) % every == 0),
    )


def _refuse(raw: dict[str, Any], activation: str) -> None:
    """What would change the results, and is not implemented, is an error rather than a wrong answer."""
    key = "hidden_activation" if raw.get("hidden_activation") else "hidden_act"
    if raw.get(key, activation) != activation:
        raise ModelError(f"{key} {raw[key]!r} is not supported; supported is {activation}")


def qwen_windows(raw: dict[str, Any]) -> dict[str, Any]:
    """The sliding windows of Qwen's dense families: in the layers from `max_window_layers` on, where `use_sliding_window` says so."""
    if not raw.get("use_sliding_window"):
        return {}
    first = raw.get("max_window_layers", 28)
    return {"window": integer(raw, "sliding_window", 4096), "sliding_layers": sliding_layers(raw, lambda layer: layer >= first)}


def one_window(raw: dict[str, Any], layers: int) -> dict[str, Any]:
    """One sliding window in all layers, where `sliding_window` has a size."""
    window = raw.get("sliding_window")
    return {} if window is None else {"window": integer(raw, "sliding_window"), "sliding_layers": frozenset(range(layers))}


def sliding_layers(raw: dict[str, Any], default: Callable[[int], bool]) -> frozenset[int]:
    """The layers that `layer_types` names as sliding, or where it is not given those for which `default` is true. Raises ModelError."""
    layers = integer(raw, "num_hidden_layers")
    types = raw.get("layer_types") or ["sliding_attention" if default(layer) else "full_attention" for layer in range(layers)]
    if len(types) != layers:
        raise ModelError(f"layer_types names {len(types)} layers, but num_hidden_layers is {layers}")
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise ModelError(f"layer_types: {', '.join(sorted(unknown))} is not supported; supported are full_attention, sliding_attention")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "sliding_attention")


def integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A field that counts something. Raises ModelError, which names it."""
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, not {value!r}")
    return value
