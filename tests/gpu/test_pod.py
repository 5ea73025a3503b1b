"""Steps attended to in one launch: POD and BatchAttention against the float32 reference, and served where they are forced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inference_service.config import load_config
from inference_service.engine.step import Row, StepPlan
from inference_service.execution.executor import build_executor
from inference_service.kernels.attention import SplitAttention
from inference_service.messages import Sampling
from tests.gpu.test_attention import QWEN, assert_near, backend, make_cache, make_layout, make_query, reference
from tests.gpu.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
NAMES = {"batch_pod": "BatchPODWithKVCache", "pod": "PODWithKVCache", "batch_attention": "PersistentKernel"}
"""A part of the kernel's name."""
STEPS = [([7, 700, 64], [(40, 40)]), ([300] * 64, [(512, 1000)]), ([1], [(700, 700)]), ([7, 64, 200], [(16, 100), (3, 640), (200, 200)])]


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_step(name: str, step: tuple[list[int], list[tuple[int, int]]]) -> None:
    fused = backend("attention_mixed", name)
    attention = SplitAttention(backend("attention_decode", "fa2"), backend("attention_prefill", "fa2"), fused)
    kv = make_cache(QWEN)
    for count in range(1, 4):  # More plans than wrappers.
        layout = make_layout(QWEN, *step)
        q = make_query(layout, QWEN)
        plan = attention.plan(layout, kv, QWEN.heads)
        assert_near(attention(q, kv, plan), reference(q, kv, layout))
        assert fused.steps == (count if fused.serves(layout) else 0)
    assert fused.steps or (name == "pod" and len(step[1]) > 1)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return directory


def serve(model_dir: Path, mixed: str) -> tuple[Any, Tensor, set[str]]:
    """Three sequences decode while a fourth is prefilled in chunks; gives the ids of all steps, and the kernels' names."""
    settings = ["device.kind=cuda", "cache.page_size=64", "cache.pages=64", "batch.max_requests=4", "batch.max_step_tokens=1024"]
    executor = build_executor(load_config(None, [*settings, f"kernels.attention_mixed={mixed}"]), model_dir, lambda what: None)
    ids = torch.randint(0, 1000, (4, 640), generator=torch.Generator().manual_seed(1)).tolist()
    pages = [list(range(slot, 64, 4)) for slot in range(4)]
    drawn = []
    executor.launch(StepPlan([Row(slot, 0, 100, ids[slot][:100], pages[slot], True, GREEDY) for slot in range(3)])).wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for step in range(5):
            rows = [Row(slot, 100 + step, 1, [], pages[slot], True, GREEDY) for slot in range(3)]
            rows.append(Row(3, 120 * step, 120, ids[3][120 * step :][:120], pages[3], True, GREEDY))
            drawn.append(executor.launch(StepPlan(rows)).wait().token_ids)
        torch.cuda.synchronize()
    kernels = {event.key for event in profiled.key_averages()}
    return executor, torch.tensor(drawn), kernels


@pytest.mark.parametrize("name", NAMES)
def test_served_where_it_is_forced(model_dir: Path, name: str) -> None:
    split, expected, _ = serve(model_dir, "auto")
    assert split.fused_steps == 0
    split.close()
    executor, drawn, kernels = serve(model_dir, name)
    assert executor.fused_steps == 5
    assert any(NAMES[name] in kernel for kernel in kernels), sorted(kernels)
    executor.close()
    # A near tie may end otherwise, and then that sequence goes on otherwise.
    assert (drawn == expected).float().mean() >= 0.8
