"""Qwen2 and Qwen2.5: the plain decoder with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, common_fields, qwen_windows
from inference_service.models.decoder import Decoder
from inference_service.models.layers import dense_mlps


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    fields = common_fields(raw) | {"attention_bias": True, "output_bias": False}
    return ModelConfig(**fields, **qwen_windows(raw))


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, dense_mlps(build, config))
