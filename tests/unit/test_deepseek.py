"""What is DeepSeek's alone: its refusals, its cache, layers that predict further tokens; and prefixes of latents found in the cache."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from inference_service.config import Kernels, load_config
from inference_service.execution.memory import page_bytes
from inference_service.kernels.selection import make_operators, select
from inference_service.models.build import Build
from inference_service.models.config_json import ModelError
from inference_service.models.families import make_model, read_config
from tests.unit.test_models import (
    CASES,
    CONFIGS,
    DEEPSEEK,
    GROUPS,
    MLA,
    Runner,
    assert_close,
    deepseek_v3,
    load,
    random_ids,
    reference_logits,
    save_random,
    setting,
    write_config,
)

DEEPSEEK_V2: dict[str, Any] = {"architectures": ["DeepseekV2ForCausalLM"], **MLA, **DEEPSEEK}
DEEPSEEK_V3: dict[str, Any] = {"architectures": ["DeepseekV3ForCausalLM"], **MLA, **DEEPSEEK, **GROUPS}


@pytest.mark.parametrize("case", ["llama", "deepseek-v2-lite", "deepseek-v3"])
def test_a_prefix_that_another_sequence_left_in_the_cache(case: str, tmp_path: Path) -> None:
    reference, ids, other = save_random(CASES[case](), tmp_path), random_ids(64), random_ids(20, seed=5)
    runner = Runner(load(tmp_path), 16)
    runner.step({0: ids[:50], 3: other[:7]})
    runner.pages[1][:3], runner.computed[1] = runner.pages[0][:3], 48
    logits = runner.step({1: ids[48:63], 3: other[7:]}, {0: ids[50]})
    theirs, others = reference_logits(reference, ids), reference_logits(reference, other)
    assert_close(logits, torch.cat((theirs[50:51], theirs[48:63], others[7:])))
    assert_close(runner.step({}, {1: ids[63]}), theirs[63:])


def test_what_predicts_further_tokens_is_passed_over(tmp_path: Path) -> None:
    """A checkpoint of DeepSeek-V3 holds layers beyond its last, which `num_nextn_predict_layers` counts."""
    config = deepseek_v3()
    reference = save_random(config, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    safetensors.torch.save_file({"model.layers.3.eh_proj.weight": torch.zeros(2)}, tmp_path / "further.safetensors")
    index = {"weight_map": {"model.layers.3.eh_proj.weight": "further.safetensors"}}
    with safetensors.safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        index["weight_map"] |= dict.fromkeys(tensors.keys(), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = random_ids(12)
    assert_close(Runner(load(tmp_path), 16).step({0: ids}), reference_logits(reference, ids))
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match="eh_proj"):
        load(tmp_path)


def test_a_cache_of_latents_is_small() -> None:
    latents, heads = read_config(CONFIGS / "moonlight-16b-a3b"), read_config(CONFIGS / "qwen1.5-moe-a2.7b")
    config = load_config(None, ["cache.page_size=64"])
    assert page_bytes(config, latents, torch.bfloat16) == 27 * 64 * (512 + 64) * 2
    assert page_bytes(config, heads, torch.bfloat16) == 24 * 64 * 2 * 16 * 128 * 2
    build = Build(make_operators(select(Kernels(), setting("sm_90", torch.bfloat16))), torch.bfloat16, torch.device("meta"))
    caches = make_model(build, replace(latents, max_context=8)).new_cache(3, 64, torch.device("meta"))
    assert sum(cache.nbytes for cache in caches) == 3 * page_bytes(config, latents, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({**DEEPSEEK_V3, "quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({**DEEPSEEK_V3, "scoring_func": "softmax"}, ["scoring_func", "softmax", "sigmoid"]),
        ({**DEEPSEEK_V3, "topk_method": "greedy"}, ["topk_method", "greedy", "noaux_tc"]),
        ({**DEEPSEEK_V3, "n_group": 5}, ["n_group 5", "n_routed_experts 12"]),
        ({**DEEPSEEK_V3, "n_group": 12}, ["n_group 12", "groups of one"]),
        ({**DEEPSEEK_V3, "n_group": 6, "topk_group": 1}, ["num_experts_per_tok 3", "2 experts", "topk_group"]),
        ({**DEEPSEEK_V3, "attention_bias": True}, ["attention_bias"]),
        ({**DEEPSEEK_V3, "kv_lora_rank": 0}, ["kv_lora_rank", "0"]),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": 15}, ["qk_rope_head_dim 15", "even"]),
        ({**DEEPSEEK_V2, "topk_method": "noaux_tc"}, ["topk_method", "noaux_tc", "greedy, group_limited_greedy"]),
        ({**DEEPSEEK_V2, "scoring_func": "sigmoid"}, ["scoring_func", "sigmoid", "softmax"]),
        ({**DEEPSEEK_V2, "norm_topk_prob": True}, ["norm_topk_prob"]),
    ],
)
def test_what_is_not_supported_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        read_config(write_config(tmp_path, **changes))
    assert all(word in str(refusal.value) for word in ["config.json", *words])
