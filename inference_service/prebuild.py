"""`inference-service prebuild`: compile the kernels that a model needs on this GPU, measure where backends compete, keep what was found."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from inference_service.config import Config, ConfigError
from inference_service.execution.cuda_start import build_cuda_executor
from inference_service.execution.device import find_device, find_dtype, find_setting
from inference_service.execution.loading import LoadedModel, Report, load_model
from inference_service.execution.memory import cache_dtype
from inference_service.execution.tuning import Tuning, describe, load_tuning, save_tuning, tuning_file
from inference_service.fetch import resolve_model
from inference_service.kernels import support
from inference_service.kernels.attention import StepLayout
from inference_service.kernels.expert_tactics import expert_tactics, microseconds
from inference_service.kernels.mla import UpProjection, empty_output
from inference_service.models.families import read_config
from inference_service.models.layers import SparseMlp

PREFILLS = ([512], [4096], [512] * 8)
"""Prompts of the steps that are timed, in tokens."""


def prebuild(config: Config, progress: Report, if_missing: bool = False) -> None:
    """Do it all; the last step is a whole start, so that everything that it compiles is compiled. Raises ConfigError without a GPU.

    `if_missing`: only where nothing is kept for this GPU, these libraries and this model.
    """
    target = find_device(config)
    if target.device.type != "cuda":
        raise ConfigError("device.kind: prebuild is for a GPU; on a CPU there is nothing to build")
    model_dir = resolve_model(config.model.path)
    shape = read_config(model_dir)
    made_for = describe(target, find_setting(config, target, shape, find_dtype(config, target.device, shape.dtype)), shape)
    if if_missing and load_tuning(made_for):
        progress(f"it is kept already, in {tuning_file(made_for)}")
        return
    loaded = load_model(config, model_dir, progress)
    operator = "mla_prefill" if loaded.shape.mla else "attention_prefill"
    measured = {operator: _time_prefill(operator, config, loaded, progress)}
    fastest = {operator: min(times, key=times.__getitem__) for operator, times in measured.items() if times}
    tactics = _tune_experts(config, loaded, progress)
    progress(f"kept in {save_tuning(Tuning(made_for, fastest, measured, tactics))}: {fastest}")
    build_cuda_executor(config, loaded, progress).close()


@torch.inference_mode()
def _tune_experts(config: Config, loaded: LoadedModel, progress: Report) -> dict[int, tuple[int, int]]:
    """The experts' CUTLASS kernels by tokens, measured with a layer of the model; none where no such kernels run."""
    sparse = next((layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, SparseMlp)), None)
    if sparse is None or not any(choice.row.operator == "moe" and "cutlass" in choice.row.backend for choice in loaded.choices):
        return {}
    begin = time.perf_counter()
    progress("tuning the experts' kernels, which takes about half a minute")
    tactics = expert_tactics().tune(
        sparse.experts,
        loaded.model.norm.weight_C,
        sparse.config.experts,
        sparse.config.top_k,
        config.batch.step_tokens,
    )
    progress(f"tuned in {time.perf_counter() - begin:.1f} s: {tactics}")
    return tactics


def _time_prefill(operator: str, config: Config, loaded: LoadedModel, progress: Report) -> dict[str, float]:
    """Microseconds of a layer's attention, summed over PREFILLS, for each backend that runs here."""
    setting = find_setting(config, loaded.target, loaded.shape, loaded.dtype)
    able = [row for row in support.rows(operator) if not row.refusal(setting) and row.backend != "torch"]
    times: dict[str, float] = {}
    for row in able:
        backend = row.make()
        each = [_time_attention(backend, lengths, config, loaded) for lengths in PREFILLS]
        times[row.backend] = round(sum(each), 1)
        timed = ", ".join(f"{len(lengths)} x {lengths[0]}: {us:.0f} us" for lengths, us in zip(PREFILLS, each, strict=True))
        progress(f"{operator} by {row.backend}: {timed}")
    return times


@torch.inference_mode()
def _time_attention(backend: Any, lengths: list[int], config: Config, loaded: LoadedModel) -> float:
    """`backend`: an Attention or, for latents, an MlaPrefill."""
    shape, device, size = loaded.shape, loaded.target.device, config.cache.page_size
    tokens, pages = sum(lengths), -(-max(lengths) // size)
    kv_P2HSD = torch.randn(len(lengths) * pages, *shape.page_shape(size), dtype=loaded.dtype, device=device)
    kv_P2HSD = kv_P2HSD.to(cache_dtype(config, loaded.dtype))
    q_THD = torch.randn(tokens, shape.heads, shape.head_dim, dtype=loaded.dtype, device=device)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    layout = StepLayout(
        decodes=0,
        lengths=lengths,
        contexts=lengths,
        positions_T=ints([position for length in lengths for position in range(length)]),
        row_T=ints([row for row, length in enumerate(lengths) for _ in range(length)]),
        pages_RM=ints(list(range(len(lengths) * pages))).view(len(lengths), pages),
        contexts_R=ints(lengths),
    )
    outputs: tuple[Any, ...] = (torch.empty_like(q_THD),)
    if shape.mla:
        sizes = shape.mla.sizes
        up = UpProjection(q_THD.new_empty(shape.heads, sizes.nope + sizes.value, sizes.latent).normal_(0, 0.05), sizes.nope)
        outputs = up, empty_output(q_THD, up)
    run = partial(backend, q_THD, kv_P2HSD, backend.plan(layout, kv_P2HSD, shape.heads, shape.attention), *outputs)
    microseconds(run, 5)
    return microseconds(run, 20)
