"""Mixtral: experts in all layers, whose weights are scaled to sum to 1."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, MoeConfig, common_fields, integer, one_window
from inference_service.models.decoder import Decoder
from inference_service.models.layers import sparse_mlps

NAMES = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    fields = common_fields(DEFAULTS | raw)
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=fields["intermediate_size"],
        renormalize=True,
        layers=frozenset(range(fields["layers"])),
    )
    return ModelConfig(**fields, **one_window(raw, fields["layers"]), moe=moe)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, sparse_mlps(build, config), NAMES)
