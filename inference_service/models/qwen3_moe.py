"""Qwen3-MoE: heads normed before rotation, and softmax-routed experts in most or all layers."""

from __future__ import annotations

from typing import Any

from inference_service.models.config import ModelConfig, MoeConfig, common_fields, integer
from inference_service.models.config_json import ModelError
from inference_service.models.decoder import Decoder
from inference_service.models.layers import Build, GatedMlp, Mlp, SparseMlp


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    fields = common_fields(raw)
    every, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    sparse = frozenset(index for index in range(fields["layers"]) if index not in dense and (index + 1) % every == 0)
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts" if "num_local_experts" in raw else "num_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=integer(raw, "moe_intermediate_size"),
        renormalize=bool(raw.get("norm_topk_prob", False)),
        layers=sparse,
    )
    if moe.top_k > moe.experts:
        raise ModelError(f"num_experts_per_tok {moe.top_k} is more than num_experts {moe.experts}")
    return ModelConfig(**fields, qk_norm=True, moe=moe)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    moe = config.moe
    assert moe is not None

    def make_mlp(index: int) -> Mlp:
        return SparseMlp(build, config.hidden_size, moe) if index in moe.layers else GatedMlp(build, config)

    return Decoder(build, config, make_mlp)
