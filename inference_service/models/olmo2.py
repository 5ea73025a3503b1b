"""OLMo 2: norms after attention and MLP instead of before, and queries and keys normed over all their heads together."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import LayerNorms, ModelConfig, common_fields
from inference_service.models.decoder import Decoder
from inference_service.models.layers import dense_mlps

NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

DEFAULTS = {"rms_norm_eps": 1e-5}


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    return ModelConfig(**common_fields(DEFAULTS | raw), norms=NORMS, projection_norm=True)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, dense_mlps(build, config))
