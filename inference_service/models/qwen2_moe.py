"""Qwen1.5-MoE and Qwen2-MoE: biases on queries, keys and values, and beside the routed experts one that every token goes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, common_fields, integer, moe_fields
from inference_service.models.decoder import Decoder
from inference_service.models.layers import sparse_mlps


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    fields = common_fields(raw) | {"attention_bias": bool(raw.get("qkv_bias", True)), "output_bias": False}
    moe = replace(moe_fields(raw, fields["layers"]), shared_size=integer(raw, "shared_expert_intermediate_size"))
    return ModelConfig(**fields, moe=moe)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, sparse_mlps(build, config))
