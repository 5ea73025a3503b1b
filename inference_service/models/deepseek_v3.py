"""DeepSeek-V3 and R1, and Moonlight: as V2, but experts are scored by a sigmoid, and chosen by score and a bias of their own."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig
from inference_service.models.config_json import ModelError
from inference_service.models.decoder import Decoder
from inference_service.models.deepseek import deepseek_fields, deepseek_moe
from inference_service.models.layers import sparse_mlps

DEFAULTS: dict[str, Any] = {
    "q_lora_rank": 1536,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    raw = DEFAULTS | raw
    for name in ("topk_method", "scoring_func"):
        if raw[name] != DEFAULTS[name]:
            raise ModelError(f"{name} {raw[name]!r} is not supported; supported is {DEFAULTS[name]}")
    fields = deepseek_fields(raw)
    # Further layers predict tokens beyond the next.
    further: int = raw.get("num_nextn_predict_layers") or 0
    unused = tuple(f"model.layers.{fields['layers'] + index}." for index in range(further))
    return ModelConfig(**fields, moe=deepseek_moe(raw, fields["layers"], sigmoid=True), unused=unused)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, sparse_mlps(build, config))
