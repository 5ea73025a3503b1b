"""DeepSeek-V2: latent attention, first layers dense, then experts by softmax, in V2 itself by groups, beside some that all tokens share."""

from __future__ import annotations

from typing import Any

from inference_service.models.build import Build
from inference_service.models.config import ModelConfig
from inference_service.models.config_json import ModelError
from inference_service.models.decoder import Decoder
from inference_service.models.deepseek import deepseek_fields, deepseek_moe
from inference_service.models.layers import sparse_mlps

DEFAULTS: dict[str, Any] = {"q_lora_rank": 1536, "topk_method": "greedy", "scoring_func": "softmax", "max_position_embeddings": 2048}
METHODS = ("greedy", "group_limited_greedy")


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    raw = DEFAULTS | raw
    if raw["topk_method"] not in METHODS:
        raise ModelError(f"topk_method {raw['topk_method']!r} is not supported; supported are {', '.join(METHODS)}")
    if raw["scoring_func"] != "softmax":
        raise ModelError(f"scoring_func {raw['scoring_func']!r} is not supported; supported is softmax")
    if raw.get("norm_topk_prob"):
        # What `transformers` ignores, and others each apply in their own way.
        raise ModelError("norm_topk_prob: true is not supported in this architecture")
    if raw["topk_method"] == "greedy":
        raw = raw | {"n_group": 1, "topk_group": 1}
    fields = deepseek_fields(raw)
    return ModelConfig(**fields, moe=deepseek_moe(raw, fields["layers"], sigmoid=False))


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, sparse_mlps(build, config))
