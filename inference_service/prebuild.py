"""`inference-service prebuild`: compile the kernels that a model needs on this GPU, measure where backends compete, keep what was found."""

from __future__ import annotations

import time

import torch
from msgspec.structs import replace

from inference_service.config import Config, ConfigError
from inference_service.execution.attention_timing import time_mixed, time_prefill
from inference_service.execution.cuda_start import build_cuda_executor
from inference_service.execution.device import find_device, find_dtype, find_setting
from inference_service.execution.loading import LoadedModel, Report, apply_config, load_model
from inference_service.execution.tuning import Tuning, describe, load_tuning, save_tuning, tuning_file
from inference_service.fetch import resolve_model
from inference_service.kernels.expert_tactics import expert_tactics
from inference_service.kernels.flashinfer_moe import CutlassMoe
from inference_service.kernels.selection import multiplies_by_cutlass, select
from inference_service.models.experts import Experts
from inference_service.models.families import read_config
from inference_service.models.layers import SparseMlp


def prebuild(config: Config, progress: Report, if_missing: bool = False) -> None:
    """Do it all; the last step is a whole start, so that everything that it compiles is compiled. Raises ConfigError without a GPU.

    `if_missing`: only where something is not kept for this GPU, these libraries and this model.
    """
    target = find_device(config)
    if target.device.type != "cuda":
        raise ConfigError("device.kind: prebuild is for a GPU; on a CPU there is nothing to build")
    model_dir = resolve_model(config.model.path)
    shape = apply_config(read_config(model_dir), config)
    setting = find_setting(config, target, shape, find_dtype(config, target.device, shape.dtype))
    made_for = describe(target, setting, shape)
    kept = load_tuning(made_for)
    tuned = bool(kept and kept.expert_tactics) or not multiplies_by_cutlass(select(config.kernels, setting))
    if if_missing and kept and kept.mixed is not None and tuned:
        progress(f"it is kept already, in {tuning_file(made_for)}")
        return
    loaded = load_model(config, model_dir, progress)
    operator = "mla_prefill" if loaded.shape.mla else "attention_prefill"
    measured = {operator: time_prefill(operator, config, loaded, progress)}
    fastest = {operator: min(times, key=times.__getitem__) for operator, times in measured.items() if times}
    tactics = tune_experts(config, loaded, progress) or (kept.expert_tactics if kept else {})
    tuning = Tuning(made_for, fastest, measured, tactics)
    progress(f"kept in {save_tuning(tuning)}: {fastest}")
    # What comes now may compile for minutes, and take the process with it.
    save_tuning(replace(tuning, mixed=time_mixed(config, loaded, fastest, progress)))
    build_cuda_executor(config, loaded, progress).close()


@torch.inference_mode()
def tune_experts(config: Config, loaded: LoadedModel, progress: Report) -> dict[int, tuple[int, int]]:
    """The experts' CUTLASS kernels by tokens, measured with a layer of the model; none where no such kernels run.

    They are measured for few tokens too, where `triton+cutlass` prefers others and `cutlass` does not.
    """
    sparse = next((layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, SparseMlp)), None)
    if sparse is None or not multiplies_by_cutlass(loaded.choices) or not isinstance(sparse.experts, Experts):
        return {}
    begin = time.perf_counter()
    progress("tuning the experts' kernels, which takes about half a minute")
    experts, cutlass = sparse.experts, CutlassMoe()
    tactics = expert_tactics().tune(
        lambda x_TC, ids_TK, weights_TK: cutlass(x_TC, experts.gate_up, experts.down, ids_TK, weights_TK),
        loaded.model.norm.weight_C,
        sparse.config.experts,
        sparse.config.top_k,
        config.batch.step_tokens,
    )
    progress(f"tuned in {time.perf_counter() - begin:.1f} s: {tactics}")
    return tactics
