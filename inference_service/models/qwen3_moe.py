"""Qwen3-MoE: heads normed before rotation, and softmax-routed experts in most or all layers."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, common_fields, moe_fields
from inference_service.models.decoder import Decoder
from inference_service.models.layers import sparse_mlps


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    fields = common_fields(raw)
    return ModelConfig(**fields, qk_norm=True, moe=moe_fields(raw, fields["layers"]))


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, sparse_mlps(build, config))
