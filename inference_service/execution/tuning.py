"""What `prebuild` measured on this GPU for this model: the fastest backends, kept in the cache directory for later starts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from inference_service.execution.device import TargetDevice
from inference_service.kernels.attention_forms import FormTimes
from inference_service.kernels.support import FP8_CACHE, Setting, dtype_name
from inference_service.kernels.versions import jit_cache_versions
from inference_service.models.config import ModelConfig


class Tuning(msgspec.Struct, frozen=True):
    """The measured file."""

    made_for: dict[str, str]
    fastest: dict[str, str]
    """The fastest backend of an operator."""
    microseconds: dict[str, dict[str, float]]
    """A launch of each backend of an operator, summed over the timed shapes."""
    expert_tactics: dict[int, tuple[int, int]] = {}
    """By tokens: FlashInfer's numbers of the CUTLASS kernels of both products (kernels/expert_tactics.py)."""
    mixed: list[FormTimes] | None = None
    """How the attention of eager steps with decodes and prefill chunks is fastest (kernels/attention_forms.py); None: not measured."""


def cache_directory() -> Path:
    """Where measured and compiled things of this machine lie."""
    return Path(os.environ.get("INFERENCE_SERVICE_CACHE") or Path.home() / ".cache" / "inference-service").expanduser() / "kernels"


def describe(target: TargetDevice, setting: Setting, shape: ModelConfig) -> dict[str, str]:
    """All that a measurement depends on: another GPU, library or shape is another file."""
    moe, attention = shape.moe, f"{shape.heads} heads, {shape.kv_heads} KV heads of {shape.head_dim}"
    return {
        "gpu": target.name,
        "architecture": target.architecture,
        **{package: setting.versions.get(package, "none") for package in ("flashinfer", "triton", "cuda", "torch")},
        "dtype": dtype_name(setting.dtype),
        "page_size": str(setting.page_size),
        "attention": f"{shape.heads} heads, {shape.mla}" if shape.mla else attention,
        "mlp": f"{shape.hidden_size} x {shape.intermediate_size}",
        "moe": f"{moe.experts} of {shape.hidden_size} x {moe.intermediate_size}, top {moe.top_k}" if moe else "none",
        **({"weights": "FP8"} if shape.fp8 else {}),
        **({"cache": "FP8"} if FP8_CACHE in setting.features else {}),
    }


PLATFORM = ("architecture", "flashinfer", "cuda", "triton", "torch")
"""Of what `describe` gives: what compiled kernels depend on, whatever the model."""


def find_misfit(here: Mapping[str, str]) -> str:
    """What was compiled for another GPU or other libraries than are `here` (as `describe` gives it), naming both sides; empty where
    something fits, or nothing was prebuilt."""
    prebuilt = [tuning.made_for for tuning in map(_read, cache_directory().glob("tuning-*.json")) if tuning]
    return compare(str(cache_directory()), prebuilt, here) or compare("the package flashinfer-jit-cache", [jit_cache_versions()], here)


def compare(what: str, built: Sequence[Mapping[str, str]], here: Mapping[str, str]) -> str:
    """Why none of these fits; each says for what it was built, and about the rest nothing."""
    differences = [[key for key in PLATFORM if key in each and each[key] != here[key]] for each in built]
    if not all(differences):
        return ""
    least, nearest = min(zip(differences, built, strict=True), key=lambda pair: len(pair[0]), default=([], {}))
    if not least:
        return ""
    there, ours = (", ".join(f"{key} {side[key]}" for key in least) for side in (nearest, here))
    return f"{what} was prebuilt for {there}, but here is {ours}: run `inference-service prebuild` on this machine"


def tuning_file(made_for: dict[str, str]) -> Path:
    return cache_directory() / f"tuning-{_digest(made_for)}.json"


def load_tuning(made_for: dict[str, str]) -> Tuning | None:
    """What was measured in the same setting; None where nothing was, or where the file cannot be read."""
    tuning = _read(tuning_file(made_for))
    return tuning if tuning and tuning.made_for == made_for else None


def save_tuning(tuning: Tuning) -> Path:
    """Write the file whole or not at all."""
    path = tuning_file(tuning.made_for)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_bytes(msgspec.json.format(msgspec.json.encode(tuning), indent=2))
    draft.replace(path)
    return path


def _read(path: Path) -> Tuning | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Tuning)
    except (OSError, msgspec.DecodeError):
        return None


def _digest(made_for: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(made_for, sort_keys=True).encode()).hexdigest()[:12]
