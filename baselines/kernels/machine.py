"""The bench: the configuration's model on the machine at hand."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

from baselines.kernels.case import SMALL, Bench, Grid
from baselines.kernels.limits import limits_of
from baselines.kernels.record import Machine
from inference_service.config import load_config
from inference_service.execution.device import find_device, find_dtype, find_setting
from inference_service.fetch import resolve_model
from inference_service.kernels.support import dtype_name
from inference_service.models.config import ModelConfig
from inference_service.models.families import read_config

DEFAULTS = ("model.path=qwen3-30b-a3b", "cache.page_size=64")
"""What is measured where no configuration says otherwise."""
PEERS = ("nvidia-cudnn-frontend", "vllm", "tensorrt-llm")


def make_bench(config_file: str | None, overrides: list[str]) -> Bench:
    """Raises ConfigError, or ModelError for the model's config.json."""
    config = load_config(config_file, overrides if config_file else [*DEFAULTS, *overrides])
    target = find_device(config)
    shape: ModelConfig = read_config(resolve_model(config.model.path))
    dtype = find_dtype(config, target.device, shape.dtype)
    setting = find_setting(config, target, shape, dtype)
    setting = replace(setting, versions={**setting.versions, **installed(PEERS)}, features=frozenset())
    return Bench(shape, target, setting, Grid() if target.device.type == "cuda" else SMALL)


def describe_machine(bench: Bench) -> Machine:
    shape, limits = bench.shape, limits_of(bench.target.name)
    moe = f", {shape.moe.experts} experts of {shape.moe.intermediate_size}, top {shape.moe.top_k}" if shape.moe else ""
    heads = f"{shape.heads} query and {shape.kv_heads} KV heads of {shape.head_dim}, pages of {bench.setting.page_size}"
    return Machine(
        device=bench.target.name,
        architecture=bench.target.architecture,
        model=f"hidden size {shape.hidden_size}, {heads}{moe}, vocabulary {shape.vocab_size}",
        dtype=dtype_name(bench.dtype),
        versions={name: version for name, version in bench.setting.versions.items() if name not in PEERS},
        peers=installed(PEERS),
        bandwidth=limits.bandwidth if limits else None,
        peak_bandwidth=limits.peak_bandwidth if limits else None,
        tflops=dict(limits.tflops) if limits else {},
    )


def installed(packages: tuple[str, ...]) -> dict[str, str]:
    """The versions of those that are there."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
