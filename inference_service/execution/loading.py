"""From the configuration to a model on its device, its weights loaded and laid out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from inference_service.config import Config, ConfigError
from inference_service.engine.step import ExecutorInfo
from inference_service.execution.device import TargetDevice, find_device, find_dtype, find_setting
from inference_service.execution.memory import used_bytes
from inference_service.execution.tuning import describe, find_misfit, load_tuning, tuning_file
from inference_service.kernels.attention_forms import drop_missing
from inference_service.kernels.flashinfer_pod import is_compiled
from inference_service.kernels.selection import Choice, make_operators, select
from inference_service.kernels.support import dtype_name
from inference_service.models.build import Build
from inference_service.models.checkpoint import load_checkpoint
from inference_service.models.config import ModelConfig
from inference_service.models.decoder import Decoder
from inference_service.models.dummy import fill_dummy
from inference_service.models.families import make_model, read_config
from inference_service.models.fp8 import SCALES

Report = Callable[[str], None]
"""Is told each step of the start and each derived number."""


@dataclass(frozen=True)
class LoadedModel:
    """A model, and with what it was built."""

    model: Decoder
    shape: ModelConfig
    dtype: torch.dtype
    target: TargetDevice
    choices: list[Choice]
    parameters: int
    taken_bytes: int = 0
    """Of the GPU's memory when nothing was loaded yet: by other processes, and by CUDA for this one."""

    def info(self, pages: int) -> ExecutorInfo:
        return ExecutorInfo(
            architecture=self.shape.architecture,
            dtype=dtype_name(self.dtype),
            parameters=self.parameters,
            vocab_size=self.shape.vocab_size,
            max_context=self.shape.max_context,
            device=self.target.name,
            device_arch=self.target.architecture,
            pages=pages,
            kernels=[choice.message() for choice in self.choices],
        )


def load_model(config: Config, model_dir: Path, progress: Report) -> LoadedModel:
    """Choose the kernels, build the model, and load its weights. Raises ConfigError or ModelError, which name key, or file and tensor."""
    target = find_device(config)
    taken_bytes = used_bytes() if target.device.type == "cuda" else 0
    shape = apply_config(read_config(model_dir), config)
    dtype = find_dtype(config, target.device, shape.dtype)
    choices = choose(config, target, shape, dtype, progress)
    if target.device.type == "cuda" and (misfit := find_misfit(describe(target, find_setting(config, target, shape, dtype), shape))):
        progress(f"warning: {misfit}")
    for choice in choices:
        progress(f"kernel {choice.row.operator}: {choice.row.backend} ({choice.reason})")
    progress(f"{shape.architecture} in {dtype_name(dtype)} on {target.name} ({target.architecture}), {torch.get_num_threads()} threads")

    model = make_model(Build(make_operators(choices), dtype, target.device, shape.fp8), shape)
    weights = model.weights()
    parameters = sum(weight.numel() for name, weight in weights.items() if not name.endswith(SCALES))
    progress(f"loading {parameters / 1e6:,.1f} M parameters ({'random' if config.model.load_format == 'dummy' else model_dir})")
    if config.model.load_format == "dummy":
        fill_dummy(weights)
    else:
        load_checkpoint(model_dir, weights, shape.tied_embeddings, shape.unused, to_fp8=config.model.quantization == "fp8")
    weights.clear()
    model.pack()
    return LoadedModel(model, shape, dtype, target, choices, parameters, taken_bytes)


def choose(
    config: Config, target: TargetDevice, shape: ModelConfig, dtype: torch.dtype, progress: Report = lambda line: None
) -> list[Choice]:
    """The kernels to use: as forced, as measured, or as the support table prefers. Raises ConfigError."""
    setting = find_setting(config, target, shape, dtype)
    if target.device.type == "cpu":
        return select(config.kernels, setting)
    made_for = describe(target, setting, shape)
    tuning = load_tuning(made_for)
    progress(f"kernels were measured: {tuning_file(made_for)}" if tuning else "kernels were not measured here: `prebuild` does that")
    if not tuning:
        return select(config.kernels, setting)
    if config.kernels.attention_mixed != "auto":
        return select(config.kernels, setting, tuning.fastest)
    mixed, missing = drop_missing(tuning.mixed or [], lambda form: is_compiled(form, setting.dtype, setting.head_dim))
    for form in missing:
        progress(f"attention_mixed by {form}: left out, since FlashInfer has not compiled it here any more: `prebuild` does that")
    return select(config.kernels, setting, tuning.fastest, mixed)


def apply_config(shape: ModelConfig, config: Config) -> ModelConfig:
    """The shape with model.max_context and model.quantization applied. Raises ConfigError where the model declares less, or cannot be
    quantized, nor its cache."""
    wanted = config.model.max_context
    if wanted > shape.max_context:
        raise ConfigError(f"model.max_context: {wanted} is more than the {shape.max_context} that the model declares")
    if config.cache.dtype == "fp8" and shape.mla:
        raise ConfigError(f"cache.dtype: fp8 is not supported for {shape.architecture}, whose cache holds latents")
    if config.model.quantization == "fp8":
        if shape.fp8:
            raise ConfigError("model.quantization: the checkpoint is in FP8 already; say none, which keeps it so")
        if shape.moe and shape.moe.clamped:
            raise ConfigError(f"model.quantization: fp8 is not supported for {shape.architecture}, whose checkpoints are in MXFP4")
    return replace(shape, max_context=wanted or shape.max_context, fp8=shape.fp8 or config.model.quantization == "fp8")
