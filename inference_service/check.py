"""`inference-service check`: the configuration with what is derived from it, the model's shape, and the kernels that would run here."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Column, Table

from inference_service.config import Config, ConfigError
from inference_service.execution.device import find_device, find_dtype, find_setting
from inference_service.execution.loading import apply_config, choose
from inference_service.execution.memory import cpu_pages, page_bytes
from inference_service.execution.tuning import describe, find_misfit
from inference_service.fetch import resolve_model
from inference_service.kernels import support
from inference_service.kernels.selection import operators_of
from inference_service.models.families import read_config


def print_check(config: Config) -> None:
    """Print it all. Raises ConfigError or ModelError for what would keep `serve` from starting, or from starting with what was prebuilt."""
    console = Console(highlight=False)
    target = find_device(config)
    model_dir = resolve_model(config.model.path)
    shape = apply_config(read_config(model_dir), config)
    dtype = find_dtype(config, target.device, shape.dtype)
    setting = find_setting(config, target, shape, dtype)
    page_size = config.cache.page_size
    room = f"what is left of {config.cache.gpu_memory_fraction:.0%} of the GPU's memory"
    if target.device.type == "cpu" or config.cache.pages:
        pages = cpu_pages(config, shape, dtype)
        room = f"{pages:,} pages of {page_size} tokens: {pages * page_size:,} tokens"

    derived = Table(title="Derived", show_header=False)
    for name, value in {
        "model": f"{shape.architecture}, {model_dir}",
        "dtype": support.dtype_name(dtype),
        "device": f"{target.name} ({target.architecture})",
        "context": f"{shape.max_context:,} tokens",
        "step": f"{config.batch.step_tokens} tokens, at most {config.batch.max_prefill_tokens or 'as measured'} of prefill beside decodes",
        "KV cache": room,
        "a cached token": f"{page_bytes(config, shape, dtype) // page_size:,} bytes in all layers{', as latents' if shape.mla else ''}",
    }.items():
        derived.add_row(name, value)

    chosen = Table("operator", "backend", "why", title="Kernels chosen")
    for choice in choose(config, target, shape, dtype):
        chosen.add_row(choice.row.operator, choice.row.backend, choice.reason)

    table = Table(
        Column("operator", no_wrap=True),
        Column("backend", no_wrap=True),
        "here",
        "graph",
        "needs",
        title=f"Support table for {target.architecture} in {support.dtype_name(dtype)}",
    )
    for operator in operators_of(setting):
        for row in support.rows(operator):
            needs = ", ".join(f"{package} {version}" for package, version in row.needs(target.architecture).items())
            here = row.refusal(setting).removeprefix(f"{operator} by {row.backend} ") or "yes"
            table.add_row(operator, row.backend, here, "yes" if row.graph else "no", needs)

    console.print("Configuration", style="bold")
    console.print_json(data=msgspec.to_builtins(config))
    console.print(derived, chosen, table, sep="\n\n")
    if target.device.type == "cuda" and (misfit := find_misfit(describe(target, setting, shape))):
        raise ConfigError(misfit)
