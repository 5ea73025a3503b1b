"""A backend that is forced is the one that runs: by the names of the kernels in a profile of one prefill and one decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from inference_service.config import load_config
from inference_service.engine.step import Row, StepPlan
from inference_service.execution.executor import build_executor
from inference_service.kernels.selection import MLA
from inference_service.messages import Sampling
from tests.gpu.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = {
    ("attention_decode", "triton"): "_attend",
    ("attention_decode", "xqa"): "kernel_mha",
    ("attention_decode", "fa2"): "BatchPrefillWithPagedKVCache",
    ("attention_prefill", "fa2"): "BatchPrefillWithPagedKVCache",
    ("attention_prefill", "fa3"): "PrefillWithKVCache",
    ("attention_prefill", "fmha_v2"): "fmha_v2",
    ("moe", "cutlass"): "cutlass",
    ("moe", "triton+cutlass"): "cutlass",
    ("moe", "triton"): "_multiply",
    ("norm", "torch"): "elementwise",
    ("sampling", "flashinfer"): "Renorm",
    ("mla_decode", "triton"): "_attend",
    ("mla_decode", "triton+fa3"): "_attend",
    ("mla_decode", "fa2"): "BatchMLAPagedAttention",
    ("mla_decode", "fa3"): "BatchMLAPageAttentionHopper",
    ("mla_prefill", "fa2"): "BatchPrefillWithRaggedKVCache",
    ("mla_prefill", "fa3"): "PrefillWithKVCache",
    ("mla_prefill", "triton"): "_attend",
    ("grouped_routing", "triton"): "_route",
    ("grouped_routing", "flashinfer"): "deepseek_v3_topk",
}
"""A part of the kernel's name."""


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories = {family: tmp_path_factory.mktemp(family) for family in ("qwen3-moe", "deepseek-v3")}
    for family, directory in directories.items():
        save_tiny(family, directory)
    return directories


@pytest.mark.parametrize(("operator", "backend"), NAMES)
def test_the_forced_backend_runs(model_dirs: dict[str, Path], operator: str, backend: str) -> None:
    model_dir = model_dirs["deepseek-v3" if operator in (*MLA, "grouped_routing") else "qwen3-moe"]
    settings = ["device.kind=cuda", "cache.page_size=64", "cache.pages=64", "batch.max_requests=4", "batch.max_step_tokens=1024"]
    executor = build_executor(load_config(None, [*settings, f"kernels.{operator}={backend}"]), model_dir, lambda what: None)
    chosen = {kernel.operator: kernel for kernel in executor.info.kernels}[operator]
    assert chosen.backend == backend and "forced" in chosen.reason
    how = Sampling(1.0, 20, 0.9, 0.0, 1)
    pages = list(range(12))
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        executor.launch(StepPlan([Row(0, 0, 640, list(range(640)), pages, True, how)])).wait()
        executor.launch(StepPlan([Row(0, 640, 1, [], pages, True, how)])).wait()
        torch.cuda.synchronize()
    executor.close()
    kernels = {event.key for event in profiled.key_averages()}
    assert any(NAMES[operator, backend] in kernel for kernel in kernels), sorted(kernels)
