"""Llama 2 and 3, SmolLM2, and what else says LlamaForCausalLM: the plain decoder."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, common_fields
from inference_service.models.decoder import Decoder
from inference_service.models.layers import dense_mlps


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    return ModelConfig(**common_fields(raw))


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, dense_mlps(build, config))
