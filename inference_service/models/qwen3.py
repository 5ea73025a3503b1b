"""Qwen3, dense: heads normed before rotation, of a size of their own."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, common_fields, qwen_windows
from inference_service.models.decoder import Decoder
from inference_service.models.layers import dense_mlps

DEFAULTS = {"head_dim": 128}


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    return ModelConfig(**common_fields(DEFAULTS | raw), qk_norm=True, **qwen_windows(raw))


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, dense_mlps(build, config))
