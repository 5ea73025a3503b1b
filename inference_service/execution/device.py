"""The device that the configuration means, and the dtype to compute in."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from inference_service.config import Config, ConfigError
from inference_service.kernels.support import (
    CLAMPED_EXPERTS,
    FP8_CACHE,
    FP8_WEIGHTS,
    SINKS,
    SOFT_CAP,
    UNEVEN_EXPERTS,
    UNEVEN_HIDDEN,
    WINDOW,
    Setting,
)
from inference_service.kernels.versions import installed_versions
from inference_service.models.config import DTYPES, ModelConfig


@dataclass(frozen=True)
class TargetDevice:
    """A device, its name for people, and its architecture as the support table writes it."""

    device: torch.device
    name: str
    architecture: str


def find_device(config: Config) -> TargetDevice:
    """The device to run on. Raises ConfigError where it is absent, or is not the architecture that the file was written for."""
    kind = config.device.kind
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        found = TargetDevice(torch.device("cpu"), "cpu", platform.machine().lower().replace("amd64", "x86_64"))
    elif torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found = TargetDevice(torch.device("cuda", torch.cuda.current_device()), torch.cuda.get_device_name(), f"sm_{major}{minor}")
    else:
        raise ConfigError("device.kind: cuda, but PyTorch finds no GPU")
    if config.device.arch not in ("auto", found.architecture):
        raise ConfigError(f"device.arch: the file is for {config.device.arch}, but this is {found.name} ({found.architecture})")
    return found


def find_dtype(config: Config, device: torch.device, checkpoint: torch.dtype) -> torch.dtype:
    """The dtype of weights, activations and KV cache."""
    if config.model.dtype == "auto":
        return torch.float32 if device.type == "cpu" else checkpoint
    return DTYPES[config.model.dtype]


def find_setting(config: Config, target: TargetDevice, shape: ModelConfig, dtype: torch.dtype) -> Setting:
    """What decides which kernels can run."""
    return Setting(
        target.architecture,
        dtype,
        shape.head_dim,
        shape.heads // shape.kv_heads,
        config.cache.page_size,
        installed_versions(),
        _features(shape) | ({FP8_CACHE} if config.cache.dtype == "fp8" else set()),
        shape.mla.sizes if shape.mla else None,
        shape.moe.grouped if shape.moe else None,
    )


def _features(shape: ModelConfig) -> frozenset[str]:
    """What the model needs of kernels beyond the plain decoder."""
    specs = [shape.attention_of(layer)[0] for layer in range(shape.layers)]
    needed = {
        WINDOW: any(spec.window for spec in specs),
        SOFT_CAP: any(spec.soft_cap for spec in specs),
        SINKS: shape.sinks,
        CLAMPED_EXPERTS: shape.moe is not None and shape.moe.clamped is not None,
        FP8_WEIGHTS: shape.fp8,
        UNEVEN_HIDDEN: shape.hidden_size % 128 != 0,
        UNEVEN_EXPERTS: shape.moe is not None and shape.moe.intermediate_size % 128 != 0,
    }
    return frozenset(feature for feature, need in needed.items() if need)
