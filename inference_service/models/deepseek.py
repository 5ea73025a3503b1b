"""What config.json of the DeepSeek families has in common."""

from __future__ import annotations

import math
from typing import Any

from inference_service.kernels.attention import AttentionSpec
from inference_service.kernels.grouped_routing import GroupedSpec
from inference_service.kernels.mla import LatentShape
from inference_service.models.config import MlaConfig, MoeConfig, common_fields, integer
from inference_service.models.config_json import ModelError


def deepseek_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of ModelConfig but the experts. Raises ModelError, which names the field."""
    if raw.get("attention_bias"):
        raise ModelError("attention_bias: true is not supported in this architecture")
    sizes = LatentShape(
        latent=integer(raw, "kv_lora_rank", 512),
        nope=integer(raw, "qk_nope_head_dim", 128),
        rope=integer(raw, "qk_rope_head_dim", 64),
        value=integer(raw, "v_head_dim", 128),
    )
    if sizes.rope % 2:
        raise ModelError(f"qk_rope_head_dim {sizes.rope} must be even: dimensions are rotated in pairs")
    rank = raw.get("q_lora_rank")
    mla = MlaConfig(sizes, rank and integer(raw, "q_lora_rank"), bool(raw.get("rope_interleave", True)))
    # The rotated part of a head is what rope settings are about.
    fields = common_fields(raw | {"head_dim": sizes.rope, "num_key_value_heads": 1})
    head_dim = sizes.nope + sizes.rope
    return fields | {"head_dim": head_dim, "mla": mla, "attention": AttentionSpec(head_dim**-0.5 * _yarn_scale(raw))}


def _yarn_scale(raw: dict[str, Any]) -> float:
    """How much larger scores are for yarn's sake."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    all_dim, factor = scaling.get("mscale_all_dim"), float(scaling.get("factor") or 1)
    return (0.1 * float(all_dim) * math.log(factor) + 1.0) ** 2 if all_dim and factor > 1 else 1.0


def deepseek_moe(raw: dict[str, Any], layers: int, sigmoid: bool) -> MoeConfig:
    """The experts. Raises ModelError, which names the field."""
    size, first, every = integer(raw, "moe_intermediate_size"), raw.get("first_k_dense_replace") or 0, integer(raw, "moe_layer_freq", 1)
    experts, groups = integer(raw, "n_routed_experts"), integer(raw, "n_group", 1)
    spec = GroupedSpec(
        experts,
        integer(raw, "num_experts_per_tok"),
        groups,
        integer(raw, "topk_group", 1),
        sigmoid,
        bool(raw.get("norm_topk_prob")),
        float(raw.get("routed_scaling_factor") or 1.0),
    )
    if experts % groups or spec.top_groups > groups:
        raise ModelError(f"n_group {groups} must divide n_routed_experts {experts}, and be at least topk_group {spec.top_groups}")
    if sigmoid and groups > 1 and experts // groups < 2:
        raise ModelError(f"n_group {groups} of n_routed_experts {experts} leaves groups of one; a group is chosen by its best two")
    if spec.top_k > (chosen := experts // groups * spec.top_groups):
        raise ModelError(f"num_experts_per_tok {spec.top_k} is more than the {chosen} experts of topk_group groups")
    return MoeConfig(
        experts=experts,
        top_k=spec.top_k,
        intermediate_size=size,
        renormalize=spec.renormalize,
        layers=frozenset(layer for layer in range(layers) if layer >= first and layer % every == 0),
        shared_size=size * (raw.get("n_shared_experts") or 0),
        shared_gated=False,
        grouped=spec,
    )
