"""The executor on a tiny real checkpoint: overlapped steps, log-probabilities, banned ids, and what it derives from the configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from inference_service.config import ConfigError, load_config
from inference_service.engine.step import Executor, Row, StepPlan, StepResult
from inference_service.execution.executor import build_executor
from inference_service.kernels.selection import operators_of
from inference_service.kernels.support import Setting
from inference_service.messages import Sampling
from tests.unit.tiny_llama import save_tiny_llama

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
PAGE_SIZE = 4
PAGES_EACH = 16
PROMPTS = [[7, 3, 250, 99, 12, 5], [1], [44, 45, 46, 47, 48, 49, 50, 51, 52], [200, 100]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        std=0.1,
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )


def build(model_dir: Path, *overrides: str) -> Executor:
    pages = PAGES_EACH * len(PROMPTS)
    settings = ["device.kind=cpu", f"cache.page_size={PAGE_SIZE}", f"cache.pages={pages}", "batch.max_requests=4", *overrides]
    return build_executor(load_config(None, settings), model_dir, lambda line: None)


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> Iterator[Executor]:
    made = build(model_dir)
    yield made
    made.close()


def row(slot: int, start: int, ids: list[int], **fields: Any) -> Row:
    """A prefill of `ids`, or a decode where there are none."""
    settings: dict[str, Any] = {"samples": True, "sampling": GREEDY} | fields
    pages = settings.pop("pages", list(range(slot * PAGES_EACH, (slot + 1) * PAGES_EACH)))
    return Row(slot, start, len(ids) or 1, ids, pages, **settings)


def run(executor: Executor, *rows: Row) -> StepResult:
    return executor.launch(StepPlan(list(rows))).wait()


def generate(executor: Executor, slots: list[int], tokens: int, overlap: bool = False, **fields: Any) -> list[list[int]]:
    """Answers to the slots' prompts: one prefill step, then decodes of all, each waited for before or after the next is launched."""
    results = [run(executor, *(row(slot, 0, PROMPTS[slot], **fields) for slot in slots))]
    tickets = []
    for step in range(tokens - 1):
        ticket = executor.launch(StepPlan([row(slot, len(PROMPTS[slot]) + step, [], **fields) for slot in slots]))
        if not overlap:
            ticket.wait()
        tickets.append(ticket)
    results += [ticket.wait() for ticket in tickets]
    return [[result.token_ids[index] for result in results] for index in range(len(slots))]


def reference_scores(model_dir: Path, ids: list[int]) -> torch.Tensor:
    models: Any = transformers.AutoModelForCausalLM
    with torch.inference_mode():
        logits: torch.Tensor = models.from_pretrained(model_dir, dtype=torch.float32)(torch.tensor([ids])).logits[0, -1]
    return logits.log_softmax(-1)


def test_steps_may_be_launched_before_the_ones_before_are_read(executor: Executor) -> None:
    one_by_one = generate(executor, [0, 1, 2, 3], 20)
    overlapped = generate(executor, [0, 1, 2, 3], 20, overlap=True)
    assert overlapped == one_by_one
    assert all(len(set(ids)) > 3 for ids in one_by_one)


def test_an_answer_does_not_depend_on_the_batch(executor: Executor) -> None:
    drawn = Sampling(1.3, 0, 0.98, 0.0, seed=5)
    for sampling in (GREEDY, drawn):
        together = generate(executor, [0, 1, 2, 3], 16, overlap=True, sampling=sampling)
        alone = [generate(executor, [slot], 16, sampling=sampling)[0] for slot in range(4)]
        assert together == alone
        assert generate(executor, [3, 1], 16, sampling=sampling) == [alone[3], alone[1]]


def test_a_plan_may_change_once_it_is_launched(executor: Executor) -> None:
    expected = run(executor, row(0, 0, PROMPTS[0])).token_ids
    for _ in range(20):
        plan = StepPlan([row(0, 0, list(PROMPTS[0]))])
        ticket = executor.launch(plan)
        plan.rows[0].pages.clear()
        plan.rows[0].token_ids.clear()
        plan.rows.clear()
        assert ticket.wait().token_ids == expected


def test_chunks_that_are_not_the_last_draw_nothing(executor: Executor) -> None:
    whole = run(executor, row(2, 0, PROMPTS[2])).token_ids
    assert run(executor, row(2, 0, PROMPTS[2][:4], samples=False)).token_ids == []
    first = run(executor, row(0, 0, PROMPTS[0])).token_ids
    mixed = run(executor, row(0, len(PROMPTS[0]), []), row(2, 4, PROMPTS[2][4:8], samples=False), row(1, 0, PROMPTS[1]))
    assert len(mixed.token_ids) == len(mixed.logprobs) == 2
    assert run(executor, row(2, 8, PROMPTS[2][8:])).token_ids == whole
    assert [first[0], mixed.token_ids[0]] == generate(executor, [0], 2)[0]


def test_pages_are_copied_before_anything_else(executor: Executor) -> None:
    """Slot 1 goes on from slot 0's first page and a copy of its second one, which the same step writes, and copies to as well."""
    ids = PROMPTS[2]
    expected = run(executor, row(0, 0, ids, logprobs=0))
    fork = row(1, 7, ids[7:], pages=[0, PAGES_EACH, PAGES_EACH + 1], logprobs=0)
    # In the order in which copies made one by one would spread what the ones before have written.
    copies = [(3 * PAGES_EACH, 2 * PAGES_EACH), (2 * PAGES_EACH, 1), (1, PAGES_EACH)]
    result = executor.launch(StepPlan([fork, row(0, 4, [9, 8, 7, 6])], copies)).wait()
    drawn, wanted = result.logprobs[0], expected.logprobs[0]
    assert drawn and wanted and result.token_ids[0] == expected.token_ids[0]
    assert drawn.chosen == pytest.approx(wanted.chosen, abs=1e-5)


def test_banned_ids_give_way_to_the_next_best(executor: Executor, model_dir: Path) -> None:
    best = reference_scores(model_dir, PROMPTS[0]).topk(3).indices.tolist()
    assert run(executor, row(0, 0, PROMPTS[0])).token_ids == best[:1]
    result = run(executor, row(0, 0, PROMPTS[0], banned_ids=best[:2], logprobs=1), row(1, 0, PROMPTS[1]))
    assert result.token_ids[0] == best[2]
    # Log-probabilities are of the unmodified distribution.
    assert result.logprobs[0] is not None and result.logprobs[0].top_ids == best[:1]


def test_logprobs_are_exact_and_only_for_rows_that_ask(executor: Executor, model_dir: Path) -> None:
    drawn = Sampling(2.0, 10, 0.9, 0.0, seed=3)
    result = run(
        executor,
        row(0, 0, PROMPTS[0], logprobs=5, sampling=drawn),
        row(1, 0, PROMPTS[1]),
        row(2, 0, PROMPTS[2], logprobs=0),
        row(3, 0, PROMPTS[3], logprobs=2),
    )
    assert result.logprobs[1] is None
    for slot, count in ((0, 5), (2, 0), (3, 2)):
        scores, given = reference_scores(model_dir, PROMPTS[slot]), result.logprobs[slot]
        assert given is not None
        assert given.chosen == pytest.approx(float(scores[result.token_ids[slot]]), abs=1e-4)
        assert given.top_ids == scores.topk(count).indices.tolist()
        assert given.top == pytest.approx(scores.topk(count).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_overlapped(model_dir: Path, dtype: str) -> None:
    executor = build(model_dir, f"model.dtype={dtype}", "kernels.gemm=onednn")
    assert executor.info.dtype == dtype
    assert generate(executor, [0, 1, 2], 12, overlap=True) == generate(executor, [0, 1, 2], 12)
    executor.close()


def test_an_error_in_a_step_reaches_who_waits(executor: Executor) -> None:
    ticket = executor.launch(StepPlan([row(0, 0, [100_000])]))
    with pytest.raises(IndexError):
        ticket.wait()
    assert run(executor, row(0, 0, PROMPTS[0])).token_ids


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(1, 0, [5]), row(0, 3, [])], "slot 0: decode rows must stand before"),
        ([row(0, PAGE_SIZE * PAGES_EACH, [])], "slot 0: 16 pages do not cover 65 tokens"),
    ],
)
def test_an_impossible_plan_is_refused_at_launch(executor: Executor, rows: list[Row], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        executor.launch(StepPlan(rows))


def test_pages_fill_the_memory_given(model_dir: Path) -> None:
    lines: list[str] = []
    settings = ["device.kind=cpu", "cache.memory_gib=0.01", "cache.page_size=16", "model.max_context=48", "device.threads=1"]
    executor = build_executor(load_config(None, settings), model_dir, lines.append)
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # Layers, keys and values, heads, slots, head dim, float32.
    assert executor.info.pages == int(0.01 * 2**30) // page_bytes
    assert executor.info.max_context == 48
    assert executor.info.dtype == "float32"
    assert [kernel.operator for kernel in executor.info.kernels] == list(operators_of(Setting("x86_64", torch.float32, 16, 1, 16)))
    assert any(f"{executor.info.pages:,} pages" in line for line in lines)
    executor.close()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.max_context=65", r"model\.max_context: 65 is more than the 64"),
        ("cache.memory_gib=0.000001", r"cache\.memory_gib: 1e-06 GiB hold no page"),
        ("device.arch=sm_90", r"device\.arch: the file is for sm_90"),
        ("kernels.moe=fast", r"kernels\.moe: no backend 'fast'"),
    ],
)
def test_impossible_settings_are_named(model_dir: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_executor(load_config(None, ["device.kind=cpu", override]), model_dir, lambda line: None)


def test_dummy_weights_need_only_a_shape(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads((model_dir / "config.json").read_text())))
    first, second = (build(tmp_path, "model.load_format=dummy") for _ in range(2))
    ids = generate(first, [0, 2], 8)
    assert ids == generate(second, [0, 2], 8)
    assert first.info.parameters == second.info.parameters > 0
    first.close()
    second.close()
