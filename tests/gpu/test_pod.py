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
from inference_service.execution.attention_timing import time_mixed
from inference_service.execution.device import find_setting
from inference_service.execution.executor import build_executor
from inference_service.execution.loading import LoadedModel, load_model
from inference_service.execution.tuning import Tuning, describe, save_tuning
from inference_service.kernels.attention import SplitAttention
from inference_service.kernels.attention_forms import FormTimes, split_name
from inference_service.kernels.selection import split_of
from inference_service.messages import Sampling
from tests.gpu.test_attention import QWEN, assert_near, backend, make_cache, make_layout, make_query, reference
from tests.gpu.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SETTINGS = ["device.kind=cuda", "cache.page_size=64", "cache.pages=64", "batch.max_requests=4", "batch.max_step_tokens=1024"]
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
        # POD takes one chunk, which must be a prompt's first.
        assert fused.steps == (0 if name == "pod" and step[1] not in ([(40, 40)], [(700, 700)]) else count)


def test_workspace_is_enough_however_contexts_are_split() -> None:
    """Batch POD halves it, for chunks and for decodes."""
    fused, kv = backend("attention_mixed", "batch_pod"), make_cache(QWEN)
    for length in range(16, 545, 24):
        layout = make_layout(QWEN, [4096, 7], [(length, 4096)])
        q = make_query(layout, QWEN)
        assert_near(fused(q, kv, fused.plan(layout, kv, QWEN.heads)), reference(q, kv, layout))


@pytest.mark.parametrize("name", ["pod", "batch_pod"])
def test_launches_on_a_side_stream_while_the_device_lags(name: str) -> None:
    """What counts POD's blocks is cleared by FlashInfer on the default stream, which nothing else would order with this one."""
    fused = backend("attention_mixed", name)
    layout, caches = make_layout(QWEN, [7, 700, 64], [(512, 512)]), [make_cache(QWEN) for _ in range(20)]
    q = make_query(layout, QWEN)
    fused(q, caches[0], fused.plan(layout, caches[0], QWEN.heads))  # Compiled and loaded, which takes longer than the device sleeps.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        plan = fused.plan(layout, caches[0], QWEN.heads)
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        # Copied at once: what runs next on this stream must find the output there.
        outputs = [fused(q, kv, plan).clone() for kv in caches]
    torch.cuda.synchronize()
    for kv, output in zip(caches, outputs, strict=True):
        assert_near(output, reference(q, kv, layout))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("llama")
    save_tiny("llama", directory)
    return directory


def serve(model_dir: Path, mixed: str, chunk: int = 120, logprobs: int = -1) -> tuple[Any, Tensor, set[str]]:
    """Three sequences decode while a fourth is prefilled in chunks; gives the ids of all steps, and the kernels' names."""
    executor = build_executor(load_config(None, [*SETTINGS, f"kernels.attention_mixed={mixed}"]), model_dir, lambda what: None)
    ids = torch.randint(0, 1000, (4, 640), generator=torch.Generator().manual_seed(1)).tolist()
    pages = [list(range(slot, 64, 4)) for slot in range(4)]
    drawn = []
    executor.launch(StepPlan([Row(slot, 0, 100, ids[slot][:100], pages[slot], True, GREEDY) for slot in range(3)])).wait()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for step in range(5):
            rows = [Row(slot, 100 + step, 1, [], pages[slot], True, GREEDY) for slot in range(3)]
            rows.append(Row(3, chunk * step, chunk, ids[3][chunk * step :][:chunk], pages[3], True, GREEDY, logprobs))
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
    assert executor.fused_steps == (1 if name == "pod" else 5), "POD takes a prompt's first chunk alone"
    assert any(NAMES[name] in kernel for kernel in kernels), sorted(kernels)
    executor.close()
    # A near tie may end otherwise, and then that sequence goes on otherwise.
    assert (drawn == expected).float().mean() >= 0.8


def load(model_dir: Path) -> tuple[LoadedModel, dict[str, str], str]:
    """The model, what its measurements are kept for, and the name of its split form."""
    config = load_config(None, SETTINGS)
    loaded = load_model(config, model_dir, lambda what: None)
    setting = find_setting(config, loaded.target, loaded.shape, loaded.dtype)
    decode, prefill = split_of(loaded.choices)
    return loaded, describe(loaded.target, setting, loaded.shape), split_name(decode.backend, prefill.backend)


def test_the_measured_table_chooses_step_by_step(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities make steps eager that a graph would compute."""
    serve(model_dir, "batch_pod")[0].close()  # What is not compiled is not chosen.
    expected = {}
    for chunk in (8, 120):
        executor, expected[chunk], _ = serve(model_dir, "auto", chunk, logprobs=1)
        assert executor.fused_steps == 0, "nothing is measured"
        executor.close()
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path))
    _, here, split = load(model_dir)
    times = [FormTimes((8, 3, 100), {split: 10.0, "batch_pod": 20.0}), FormTimes((120, 3, 100), {split: 20.0, "batch_pod": 10.0})]
    save_tuning(Tuning(here, {}, {}, {}, times))
    for chunk, fused in ((8, 0), (120, 5)):
        executor, drawn, kernels = serve(model_dir, "auto", chunk, logprobs=1)
        assert executor.fused_steps == fused and executor.compiles == 0
        assert any(NAMES["batch_pod"] in kernel for kernel in kernels) == bool(fused), sorted(kernels)
        assert any("measured table: batch_pod at 1 of 2 sizes" in kernel.reason for kernel in executor.info.kernels)
        assert (drawn == expected[chunk]).float().mean() >= 0.8
        executor.close()
        executor, _, _ = serve(model_dir, "auto", chunk)
        assert executor.fused_steps == 0, "a short step is a graph"
        executor.close()


def test_forms_are_timed(model_dir: Path) -> None:
    said: list[str] = []
    loaded, _, split = load(model_dir)
    times = time_mixed(load_config(None, SETTINGS), loaded, {}, said.append)
    # The model's contexts end at 1024.
    assert [each.size for each in times] == [(512, decodes, 512) for decodes in (8, 32, 128)]
    assert all({split, "batch_pod"} <= set(each.microseconds) and min(each.microseconds.values()) > 0 for each in times)
    assert any("prefill tokens beside 128 decodes of 512" in line for line in said)
    assert not any("left out: it is wrong" in line for line in said)
