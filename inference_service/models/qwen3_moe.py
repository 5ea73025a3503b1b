"""Qwen3-MoE: heads normed before rotation, and softmax-routed experts in most or all layers."""

from __future__ import annotations

from typing import Any

from inference_service.models.config import ModelConfig, ModelError, MoeConfig, common_fields
from inference_service.models.decoder import Decoder
from inference_service.models.layers import Build, GatedMlp, Mlp, SparseMlp


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    fields = common_fields(raw)
    every, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    sparse = frozenset(index for index in range(fields["layers"]) if index not in dense and (index + 1) % every == 0)
    try:
        moe = MoeConfig(raw["num_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"], raw["norm_topk_prob"], sparse)
    except KeyError as error:
        raise ModelError(f"{error.args[0]} is missing") from None
    if not 1 <= moe.top_k <= moe.experts:
        raise ModelError(f"num_experts_per_tok {moe.top_k} is not between 1 and num_experts {moe.experts}")
    return ModelConfig(**fields, qk_norm=True, moe=moe)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    moe = config.moe
    assert moe is not None

    def make_mlp(index: int) -> Mlp:
        return SparseMlp(build, config.hidden_size, moe) if index in moe.layers else GatedMlp(build, config)

    return Decoder(build, config, make_mlp)
