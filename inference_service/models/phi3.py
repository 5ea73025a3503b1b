"""Phi-3, Phi-3.5 and Phi-4: the plain decoder, whose checkpoints hold fused matrices; long contexts by longrope, in Phi-4-mini over a part
of each head."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, common_fields, one_window
from inference_service.models.decoder import Decoder
from inference_service.models.layers import dense_mlps

LONGROPE = ("su", "yarn")
"""What early checkpoints call it."""

DEFAULTS = {"rms_norm_eps": 1e-5}


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    scaling = raw.get("rope_scaling")
    if scaling and scaling.get("type") in LONGROPE:
        raw = raw | {"rope_scaling": scaling | {"type": "longrope"}}
    fields = common_fields(DEFAULTS | raw, partial_rotary=True)
    return ModelConfig(**fields, **one_window(raw, fields["layers"]), fused_checkpoint=True)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, dense_mlps(build, config))
