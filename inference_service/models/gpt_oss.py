"""GPT-OSS: attention sinks, a sliding window in every other layer, and experts with biases and clamped SwiGLU, published in MXFP4."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inference_service.kernels.moe import ClampedSwiglu
from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, MoeConfig, common_fields, integer, sliding_layers
from inference_service.models.config_json import ModelError
from inference_service.models.decoder import Decoder
from inference_service.models.linear import Linear

ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def parse(raw: dict[str, Any]) -> ModelConfig:
    """Read config.json's fields. Raises ModelError."""
    quantization = raw.get("quantization_config") or {"quant_method": "mxfp4"}
    if quantization.get("quant_method") != "mxfp4":
        raise ModelError(f"quantization_config: quant_method {quantization.get('quant_method')!r} is not supported; supported is mxfp4")
    defaults: dict[str, Any] = {
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
    }
    raw = defaults | raw | {"quantization_config": None}
    if not (raw.get("rope_parameters") or raw.get("rope_scaling")):
        raw["rope_scaling"] = ROPE
    fields = common_fields(raw)
    moe = MoeConfig(
        experts=integer(raw, "num_local_experts"),
        top_k=integer(raw, "num_experts_per_tok"),
        intermediate_size=fields["intermediate_size"],
        renormalize=True,
        layers=frozenset(range(fields["layers"])),
        clamped=(float(raw.get("swiglu_alpha", 1.702)), float(raw.get("swiglu_limit", 7.0))),
    )
    return ModelConfig(
        **fields,
        moe=moe,
        sinks=True,
        window=integer(raw, "sliding_window", 128),
        sliding_layers=sliding_layers(raw, lambda layer: layer % 2 == 0),
    )


class GptOssMlp:
    """Experts whose weights a checkpoint holds in one tensor each, inputs before outputs, gate and up alternating."""

    def __init__(self, build: Build, config: ModelConfig) -> None:
        moe, size = config.moe, config.intermediate_size
        assert moe is not None and moe.clamped is not None
        self.routing, self.moe, self.top_k = build.operators.routing, build.operators.moe, moe.top_k
        self.router = Linear(build, {"router": moe.experts}, config.hidden_size, bias=True)
        self.gate_up = build.empty(moe.experts, 2 * size, config.hidden_size)
        self.down = build.empty(moe.experts, config.hidden_size, size)
        biases = build.empty(moe.experts, 2 * size), build.empty(moe.experts, config.hidden_size)
        self.clamped = ClampedSwiglu(*biases, *moe.clamped)

    def weights(self) -> dict[str, Tensor]:
        return self.router.weights() | {
            "experts.gate_up_proj": self.gate_up.transpose(1, 2),
            "experts.gate_up_proj_bias": self.clamped.gate_up_bias_E2I,
            "experts.down_proj": self.down.transpose(1, 2),
            "experts.down_proj_bias": self.clamped.down_bias_EC,
        }

    def pack(self) -> None:
        self.router.pack()
        self.gate_up, self.down = self.moe.pack(self.gate_up, self.down)

    def __call__(self, x_TC: Tensor) -> Tensor:
        # The softmax of the chosen alone is that of all, scaled to sum to 1.
        ids_TK, weights_TK = self.routing(self.router(x_TC), self.top_k, renormalize=True)
        return self.moe(x_TC, self.gate_up, self.down, ids_TK, weights_TK, self.clamped)


def make(build: Build, config: ModelConfig) -> Decoder:
    """The model, its weights uninitialized."""
    return Decoder(build, config, lambda layer: GptOssMlp(build, config))
