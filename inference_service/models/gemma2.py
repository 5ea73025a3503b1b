"""Gemma 2: norms around attention and MLP, soft caps on scores and logits, and a sliding window in every other layer."""

from __future__ import annotations

from typing import Any

from inference_service.kernels.attention import AttentionSpec
from inference_service.models.build import Build
from inference_service.models.config import LayerNorms, ModelConfig, common_fields, integer, sliding_layers
from inference_service.models.decoder import Decoder
from inference_service.models.layers import dense_mlps

NORMS = LayerNorms("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    raw = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    return ModelConfig(**gemma_fields(raw), sliding_layers=sliding_layers(raw, lambda layer: layer % 2 == 0))


def gemma_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields that Gemma 2 and 3 share. Raises ModelError, which names the field."""
    raw = {"head_dim": 256, "tie_word_embeddings": True, **raw}
    fields = common_fields(raw, activation="gelu_pytorch_tanh")
    cap = raw.get("attn_logit_softcapping")
    return fields | {
        "norms": NORMS,
        "zero_centered_norms": True,
        "embedding_scale": fields["hidden_size"] ** 0.5,
        "attention": AttentionSpec(integer(raw, "query_pre_attn_scalar", 256) ** -0.5, cap and float(cap)),
        "logits_soft_cap": raw.get("final_logit_softcapping"),
        "window": integer(raw, "sliding_window", 4096),
    }


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, dense_mlps(build, config))
