"""Which families are served, by the architecture that config.json names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from inference_service.models import (
    deepseek_v2,
    deepseek_v3,
    gemma2,
    gemma3,
    gpt_oss,
    llama,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from inference_service.models.build import Build
from inference_service.models.config import ModelConfig
from inference_service.models.config_json import ModelError, read_json
from inference_service.models.decoder import Decoder


class Family(Protocol):
    """A module of this folder: reads its config.json, and makes its model with uninitialized weights."""

    def parse(self, raw: dict[str, Any]) -> ModelConfig: ...

    def make(self, build: Build, config: ModelConfig) -> Decoder: ...


FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "GptOssForCausalLM": gpt_oss,
    "LlamaForCausalLM": llama,
    "MixtralForCausalLM": mixtral,
    "Olmo2ForCausalLM": olmo2,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen2MoeForCausalLM": qwen2_moe,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
}


def read_config(model_dir: Path) -> ModelConfig:
    """The shape of the model in a directory. Raises ModelError, which names the file and the field."""
    raw = read_json(model_dir)
    path = model_dir / "config.json"
    architecture = next(iter(raw.get("architectures") or ["none"]))
    if architecture not in FAMILIES:
        raise ModelError(f"{path}: architecture {architecture!r} is not supported; supported are {', '.join(FAMILIES)}")
    try:
        return FAMILIES[architecture].parse(raw)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None


def make_model(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return FAMILIES[config.architecture].make(build, config)
