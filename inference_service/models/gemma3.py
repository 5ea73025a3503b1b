"""Gemma 3, text: as Gemma 2 without soft caps, with heads normed, and five sliding layers, of their own rotary base, to a global one."""

from __future__ import annotations

from typing import Any

from inference_service.models.config import ModelConfig, integer, sliding_layers
from inference_service.models.config_json import ModelError
from inference_service.models.gemma2 import gemma_fields, make
from inference_service.models.rotary import read_rope

__all__ = ["make", "parse"]


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    if raw.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: attention to later tokens is not supported")
    period = integer(raw, "sliding_window_pattern", 6)
    by_kind = raw.get("rope_parameters") or {}
    full = by_kind.get("full_attention") or raw.get("rope_scaling") or {}
    sliding = by_kind.get("sliding_attention") or {}
    full_rope = {"rope_theta": raw.get("rope_theta") or 1e6, **full}
    sliding_rope = {"rope_theta": raw.get("rope_local_base_freq") or 1e4, **sliding}
    fields = gemma_fields(raw | {"rope_parameters": full_rope, "rope_scaling": None})
    return ModelConfig(
        **fields,
        qk_norm=True,
        sliding_layers=sliding_layers(raw, lambda layer: (layer + 1) % period != 0),
        sliding_rope=read_rope(raw | {"rope_parameters": sliding_rope, "rope_scaling": None}),
    )
