"""Each family on the GPU in bfloat16 against transformers in float32: prefill in one piece and in chunks, and decodes from CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from inference_service.config import load_config
from inference_service.engine.step import Row, StepPlan
from inference_service.execution.cuda_executor import CudaExecutor
from inference_service.execution.executor import build_executor
from inference_service.execution.packed_inputs import device_fields
from inference_service.kernels.flashinfer_mla import FEW_ROWS
from inference_service.messages import Sampling
from tests.gpu.test_forced_backends import NAMES
from tests.gpu.tiny import FAMILIES, reference_logits, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
PAGE_SIZE, SEQUENCES, LENGTH = 64, 8, 272
SETTINGS = ["device.kind=cuda", f"cache.page_size={PAGE_SIZE}", "cache.pages=64", "batch.max_requests=16", "batch.max_step_tokens=2304"]


@dataclass
class Case:
    executor: CudaExecutor
    ids_BT: Tensor
    expected_BTV: Tensor
    """By transformers in float32."""
    rounded_BTV: Tensor
    """By transformers in bfloat16: how much rounding alone does."""

    def assert_agrees(self, ours_BTV: Tensor, first: int = 0) -> None:
        """ours_BTV are the logits from position `first` on."""
        last = first + ours_BTV.shape[1]
        expected, rounded = self.expected_BTV[:, first:last], self.rounded_BTV[:, first:last]
        error, rounding = (float((logits - expected).norm() / expected.norm()) for logits in (ours_BTV.float(), rounded))
        print(f"relative error {error:.2e}, of transformers in bfloat16 {rounding:.2e}")
        assert error <= 1.5 * rounding + 1e-3
        self.assert_same_best(ours_BTV.argmax(-1), first)

    def assert_same_best(self, ids_BT: Tensor, first: int = 0) -> None:
        last = first + ids_BT.shape[1]
        expected, rounded = self.expected_BTV[:, first:last].argmax(-1), self.rounded_BTV[:, first:last].argmax(-1)
        ours, theirs = (float((ids.to(expected.device) == expected).float().mean()) for ids in (ids_BT, rounded))
        print(f"top-1 agreement {ours:.4f}, of transformers in bfloat16 {theirs:.4f}, over {expected.numel()} positions")
        # Of a few positions, two more: one near tie must not decide.
        assert ours >= 0.99 - (0 if expected.numel() >= 2000 else 2 / expected.numel())


def make_case(family: str, model_dir: Path, *overrides: str) -> Case:
    save_tiny(family, model_dir)
    ids_BT = torch.randint(0, 1000, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    expected, rounded = (reference_logits(model_dir, ids_BT.cuda(), dtype) for dtype in (torch.float32, torch.bfloat16))
    executor = build_executor(load_config(None, [*SETTINGS, *overrides]), model_dir, print)
    assert isinstance(executor, CudaExecutor)
    return Case(executor, ids_BT, expected, rounded)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = make_case(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.executor.close()


def pages(slot: int) -> list[int]:
    """Interleaved and backwards, so that no sequence is contiguous."""
    each = LENGTH // PAGE_SIZE + 1
    return list(range(slot, each * SEQUENCES, SEQUENCES))[::-1]


def all_logits(executor: CudaExecutor, rows: list[Row]) -> Tensor:
    """Every token's logits, of an eager step."""
    staging = executor._next_staging()
    with executor._on_stream():
        step = executor._upload(rows, executor._slots.measure(rows), staging)
        fields, runner = device_fields(executor._runner.block, step.sizes), executor._runner
        logits_TV = runner.model.forward(fields.token_ids_T, step.layout(fields), runner.caches, None)
    torch.cuda.synchronize()
    return logits_TV


def chunk(case: Case, slot: int, start: int, length: int) -> Row:
    return Row(slot, start, length, case.ids_BT[slot, start : start + length].tolist(), pages(slot), True, GREEDY)


def test_prefill_of_whole_prompts(case: Case) -> None:
    logits_TV = all_logits(case.executor, [chunk(case, slot, 0, LENGTH) for slot in range(SEQUENCES)])
    case.assert_agrees(logits_TV.view(SEQUENCES, LENGTH, -1))


def test_prefill_in_chunks(case: Case) -> None:
    """Chunks that end within a page, and a last one of a single token."""
    parts = []
    for start, length in ((0, 64), (64, 100), (164, 107), (271, 1)):
        logits_TV = all_logits(case.executor, [chunk(case, slot, start, length) for slot in range(SEQUENCES)])
        parts.append(logits_TV.view(SEQUENCES, length, -1))
    case.assert_agrees(torch.cat(parts, dim=1))


@pytest.mark.parametrize("batch", [8, 5, 1])
def test_decodes_from_graphs(case: Case, batch: int) -> None:
    """Teacher-forced: each step is given the next id of the text, whatever was drawn. Five rows are padded to six."""
    executor, first = case.executor, 5
    executor.launch(StepPlan([chunk(case, slot, 0, first) for slot in range(batch)])).wait()
    drawn = []
    for position in range(first, LENGTH if batch > 1 else 60):
        with executor._on_stream():
            executor._runner.last_token_id_S[:batch].copy_(case.ids_BT[:batch, position])
        rows = [Row(slot, position, 1, [], pages(slot), True, GREEDY) for slot in range(batch)]
        assert executor._graphs.sizes(executor._slots.measure(rows)) is not None
        drawn.append(executor.launch(StepPlan(rows)).wait().token_ids)
    some = Case(executor, case.ids_BT[:batch], case.expected_BTV[:batch], case.rounded_BTV[:batch])
    some.assert_same_best(torch.tensor(drawn).T, first)


def test_chunks_beside_decodes(case: Case) -> None:
    """Half of the sequences decode from position 200 on while the others are prefilled in chunks of 17."""
    executor, half = case.executor, SEQUENCES // 2
    executor.launch(StepPlan([chunk(case, slot, 0, 200) for slot in range(half)])).wait()
    decoded, prefilled = [], []
    for step in range(16):
        with executor._on_stream():
            executor._runner.last_token_id_S[:half].copy_(case.ids_BT[:half, 200 + step])
        rows = [Row(slot, 200 + step, 1, [], pages(slot), True, GREEDY) for slot in range(half)]
        rows += [chunk(case, slot, 17 * step, 17) for slot in range(half, SEQUENCES)]
        ids = executor.launch(StepPlan(rows)).wait().token_ids
        decoded.append(ids[:half])
        prefilled.append(ids[half:])
    best_BT = case.expected_BTV.argmax(-1).cpu()
    best_BT = torch.cat((best_BT[:half, 200:216], best_BT[half:, 16::17]))
    ours_BT = torch.cat((torch.tensor(decoded).T, torch.tensor(prefilled).T))
    wrong = int((ours_BT != best_BT).sum())
    assert wrong <= 4, "of 128"


@pytest.mark.parametrize("backend", ["triton+fa3", "triton", "fa2", "fa3"])
def test_decodes_by_each_kernel_come_from_graphs(backend: str, tmp_path: Path) -> None:
    """Teacher-forced from within a page to the fifth, and launched up to four ahead of what is read; five rows are padded to six, the
    first number for FA3."""
    case = make_case("deepseek-v3", tmp_path, f"kernels.mla_decode={backend}")
    executor, ids_BT, first = case.executor, case.ids_BT.cuda(), 5
    assert backend in [kernel.backend for kernel in executor.info.kernels if kernel.operator == "mla_decode"]
    for batch in (8, 5, 1):
        executor.launch(StepPlan([chunk(case, slot, 0, first) for slot in range(batch)])).wait()
        tickets = []
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for position in range(first, LENGTH):
                with executor._on_stream():
                    executor._runner.last_token_id_S[:batch].copy_(ids_BT[:batch, position])
                rows = [Row(slot, position, 1, [], pages(slot), True, GREEDY) for slot in range(batch)]
                assert executor._graphs.sizes(executor._slots.measure(rows)) is not None
                tickets.append(executor.launch(StepPlan(rows)))
            drawn = [ticket.wait().token_ids for ticket in tickets]
        some = Case(executor, case.ids_BT[:batch], case.expected_BTV[:batch], case.rounded_BTV[:batch])
        some.assert_same_best(torch.tensor(drawn).T, first)
        few, _, many = backend.partition("+")
        name = NAMES["mla_decode", many if many and batch > FEW_ROWS else few]
        launched = sum(event.count for event in profiled.key_averages() if name in event.key)
        assert launched == len(tickets) * len(executor._runner.model.layers)
    # Beside chunks decodes attend by the own kernel, in the same pages.
    test_chunks_beside_decodes(case)
    assert executor.compiles == 0
    executor.close()
