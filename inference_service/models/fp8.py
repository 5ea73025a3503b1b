"""FP8 checkpoints as DeepSeek and Qwen publish them: NAME.weight in E4M3, NAME.weight_scale_inv with a scale for each block of
128 x 128."""

from __future__ import annotations

import re
from typing import Any

from inference_service.kernels.fp8 import BLOCK
from inference_service.models.config_json import ModelError

SCALES = "_scale_inv"
"""What follows a matrix' name in that of its scales, by which its values are multiplied, whatever the name says."""
_QUANTIZED = re.compile(r"(_proj|_with_mqa|\.w[123])\.weight$")
_PLAIN = "kv_b_proj.weight"
"""Multiplied in parts, which no FP8 kernel does."""


def in_fp8(name: str) -> bool:
    """Whether a tensor of a checkpoint is rounded to FP8 where `model.quantization` says so: layers' matrices but routers."""
    return bool(_QUANTIZED.search(name)) and not name.endswith(_PLAIN)


def read_fp8(raw: dict[str, Any]) -> bool:
    """Whether config.json is of an FP8 checkpoint. Raises ModelError for other quantizations, and other forms of this one."""
    quantization = raw.get("quantization_config") or {}
    if not quantization:
        return False
    if (method := quantization.get("quant_method")) != "fp8":
        raise ModelError(f"quantization_config: quant_method {method!r} is not supported; supported is fp8")
    for field, default, supported in (
        ("weight_block_size", None, [BLOCK, BLOCK]),
        ("activation_scheme", "dynamic", "dynamic"),
        ("fmt", "e4m3", "e4m3"),
    ):
        if (value := quantization.get(field, default)) != supported:
            raise ModelError(f"quantization_config: {field} {value!r} is not supported; supported is {supported}")
    return True
