"""What `prebuild` measured on this GPU for this model: the fastest backends, kept in the cache directory for later starts."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import msgspec

from inference_service.execution.device import TargetDevice
from inference_service.kernels.support import Setting, dtype_name
from inference_service.models.config import ModelConfig


class Tuning(msgspec.Struct, frozen=True):
    """The measured file."""

    made_for: dict[str, str]
    fastest: dict[str, str]
    """The fastest backend of an operator."""
    microseconds: dict[str, dict[str, float]]
    """A launch of each backend of an operator, summed over the timed shapes."""


def cache_directory() -> Path:
    """Where measured and compiled things of this machine lie."""
    return Path(os.environ.get("INFERENCE_SERVICE_CACHE") or Path.home() / ".cache" / "inference-service").expanduser() / "kernels"


def describe(target: TargetDevice, setting: Setting, shape: ModelConfig) -> dict[str, str]:
    """All that a measurement depends on: another GPU, library or shape is another file."""
    moe = shape.moe
    return {
        "gpu": target.name,
        "architecture": target.architecture,
        **{package: setting.versions.get(package, "none") for package in ("flashinfer", "triton", "cuda")},
        "dtype": dtype_name(setting.dtype),
        "page_size": str(setting.page_size),
        "attention": f"{shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}",
        "mlp": f"{shape.hidden_size} x {shape.intermediate_size}",
        "moe": f"{moe.experts} of {shape.hidden_size} x {moe.intermediate_size}, top {moe.top_k}" if moe else "none",
    }


def tuning_file(made_for: dict[str, str]) -> Path:
    return cache_directory() / f"tuning-{_digest(made_for)}.json"


def autotune_file(made_for: dict[str, str]) -> Path:
    """Where FlashInfer keeps what its autotuner has found."""
    return cache_directory() / f"flashinfer-autotune-{_digest(made_for)}.json"


def load_tuning(made_for: dict[str, str]) -> Tuning | None:
    """What was measured in the same setting; None where nothing was, or where the file cannot be read."""
    try:
        tuning = msgspec.json.decode(tuning_file(made_for).read_bytes(), type=Tuning)
    except (OSError, msgspec.DecodeError):
        return None
    return tuning if tuning.made_for == made_for else None


def save_tuning(tuning: Tuning) -> Path:
    """Write the file whole or not at all."""
    path = tuning_file(tuning.made_for)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(tuning), indent=2))
    draft.replace(path)
    return path


def _digest(made_for: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()[:12]
