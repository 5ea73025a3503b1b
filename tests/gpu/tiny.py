"""Small random checkpoints whose shapes the GPU kernels take: heads of 128, eight query heads a KV head, pages of 64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


MLP: dict[str, Any] = {"intermediate_size": 768}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 256, "num_experts_per_tok": 4}
LATENTS: dict[str, Any] = {"num_key_value_heads": 16, "head_dim": 64, "kv_lora_rank": 512, "v_head_dim": 128, "first_k_dense_replace": 1}
DEEPSEEK: dict[str, Any] = COMMON | MLP | EXPERTS | LATENTS | {"n_routed_experts": 16, "routed_scaling_factor": 1.0}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=None, rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=256, n_group=4, topk_group=2),
    "moonlight": lambda: transformers.DeepseekV3Config(**DEEPSEEK, q_lora_rank=None, n_group=1, topk_group=1),
    "llama": lambda: transformers.LlamaConfig(**COMMON, **MLP),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, intermediate_size=256, num_local_experts=8),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON, **MLP),
    "phi3": lambda: transformers.Phi3Config(**COMMON, **MLP, pad_token_id=0),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, **MLP),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **(COMMON | MLP | EXPERTS | {"num_experts": 12, "shared_expert_intermediate_size": 1024, "num_key_value_heads": 16})
    ),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, **MLP),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**COMMON, **MLP, **EXPERTS, num_experts=16, norm_topk_prob=True),
}


def save_tiny(family: str, model_dir: Path, std: float = 0.02, spread: float = 2.5, router: float = 8.0) -> None:
    """Write a bfloat16 checkpoint with weights of `std` and norms near 1.

    The rows of the LM head are of unlike length, so that the best logit seldom has a rival within rounding; and routers' weights are
    `router` times as large, so that the last of the chosen experts, which rounding may exchange for another, weighs little. With both,
    transformers in bfloat16 has the best token of float32 at 99.7 % of all positions; without, at 98.7 %, and so would nobody reach 99 %.
    """
    torch.manual_seed(0)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(FAMILIES[family](), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0, 0.1) if name.endswith("norm.weight") else weight.normal_(0.0, std)
            weight.mul_(router if name.endswith("mlp.gate.weight") else 1.0)
        head = model.lm_head.weight
        head.mul_((spread * torch.randn(len(head), 1)).exp())
    model.to(torch.bfloat16).save_pretrained(model_dir)


def reference_logits(model_dir: Path, ids_BT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What transformers gives for each token, on the ids' device."""
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").to(ids_BT.device).eval()
    with torch.inference_mode():
        logits_BTV: torch.Tensor = model(ids_BT).logits
    return logits_BTV.float()
