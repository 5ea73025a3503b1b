"""A model's shape, read from the config.json of a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from inference_service.models.config_json import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear (all angles slower by `factor`) or llama3 (only the slow ones)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers' experts."""

    experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    layers: frozenset[int]
    """Which layers are sparse."""


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
    mlp_bias: bool
    qk_norm: bool = False
    moe: MoeConfig | None = None


def common_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig that all families share. Raises ModelError, which names the field."""
    _refuse(raw)
    heads = integer(raw, "num_attention_heads")
    hidden_size = integer(raw, "hidden_size")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    kv_heads = integer(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return {
        "architecture": raw["architectures"][0],
        "dtype": DTYPES[dtype],
        "vocab_size": integer(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": integer(raw, "intermediate_size"),
        "layers": integer(raw, "num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": integer(raw, "head_dim", hidden_size // heads),
        "max_context": integer(raw, "max_position_embeddings"),
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": _rope(raw),
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "attention_bias": bool(raw.get("attention_bias", False)),
        "mlp_bias": bool(raw.get("mlp_bias", False)),
    }


def _refuse(raw: dict[str, Any]) -> None:
    """What would change the results, and is not implemented, is an error rather than a wrong answer."""
    if raw.get("quantization_config"):
        raise ModelError("quantization_config: quantized checkpoints are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported; supported is silu")
    if raw.get("use_sliding_window"):
        raise ModelError("use_sliding_window: sliding windows are not supported")
    for holder in (raw, raw.get("rope_parameters") or {}):
        if holder.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"partial_rotary_factor {holder['partial_rotary_factor']} is not supported; supported is 1")


def integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A field that counts something. Raises ModelError, which names it."""
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"{key} must be a positive integer, not {value!r}")
    return value


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """Both forms: rope_theta beside rope_scaling, and rope_parameters with all in one."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    try:
        if kind == "linear":
            return RopeConfig(theta, kind, float(scaling["factor"]))
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                float(scaling["factor"]),
                float(scaling["low_freq_factor"]),
                float(scaling["high_freq_factor"]),
                int(scaling["original_max_position_embeddings"]),
            )
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r} lacks {error.args[0]}") from None
    raise ModelError(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3")
