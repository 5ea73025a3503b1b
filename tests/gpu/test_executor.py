"""The CUDA executor: graphs against eager steps, padded rows, overlap, log-probabilities, banned ids, sampling, memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from inference_service.config import load_config
from inference_service.engine.step import Row, StepPlan, StepResult
from inference_service.execution.cuda_executor import CudaExecutor
from inference_service.execution.edits import Edits
from inference_service.execution.executor import build_executor
from inference_service.execution.expert_count import STEPS
from inference_service.execution.graphs import CapturedStep
from inference_service.execution.memory import used_bytes
from inference_service.execution.packed_inputs import PackedStep, Sizes
from inference_service.kernels.routing import TritonRouting
from inference_service.kernels.sampling import TorchSampling
from inference_service.messages import Sampling
from tests.gpu.tiny import save_tiny
from tests.unit.edits_reference import edited

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
EDITED = replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=0.3, logit_bias=[(5, 9.0), (8, -3.0)])
PAGE_SIZE, PAGES_EACH, SLOTS = 64, 4, 12
PROMPTS = [[(7 * slot + 13 * place) % 1000 for place in range(3 + 9 * slot)] for slot in range(SLOTS)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-moe")
    save_tiny("qwen3-moe", path, std=0.05, spread=1.0, router=1.0)
    # Long enough for several widths of the page table.
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return path


def build(model_dir: Path, *overrides: str, lines: list[str] | None = None) -> CudaExecutor:
    settings = ["device.kind=cuda", f"cache.page_size={PAGE_SIZE}", f"batch.max_requests={SLOTS}", "batch.max_step_tokens=1024"]
    executor = build_executor(load_config(None, [*settings, *overrides]), model_dir, print if lines is None else lines.append)
    assert isinstance(executor, CudaExecutor)
    return executor


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> Iterator[CudaExecutor]:
    made = build(model_dir, f"cache.pages={SLOTS * PAGES_EACH + 3}")
    yield made
    made.close()


def row(slot: int, start: int, ids: list[int], **fields: Any) -> Row:
    settings: dict[str, Any] = {"samples": True, "sampling": GREEDY} | fields
    return Row(slot, start, len(ids) or 1, ids, list(range(1 + slot * PAGES_EACH, 1 + (slot + 1) * PAGES_EACH)), **settings)


def run(executor: CudaExecutor, *rows: Row) -> StepResult:
    return executor.launch(StepPlan(list(rows))).wait()


def generate(executor: CudaExecutor, slots: list[int], tokens: int, overlap: bool = True, **fields: Any) -> list[list[int]]:
    """Answers to the slots' prompts: a prefill each, then decodes of all, launched up to three ahead or one by one."""
    firsts = [run(executor, row(slot, 0, PROMPTS[slot], **fields)).token_ids[0] for slot in slots]
    tickets, results = [], []
    for step in range(tokens - 1):
        tickets.append(executor.launch(StepPlan([row(slot, len(PROMPTS[slot]) + step, [], **fields) for slot in slots])))
        if not overlap or len(tickets) == 3:
            results.append(tickets.pop(0).wait().token_ids)
    results += [ticket.wait().token_ids for ticket in tickets]
    return [[first, *(ids[index] for ids in results)] for index, first in enumerate(firsts)]


def without_graphs(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor._graphs, "sizes", lambda step: None)


def test_nothing_is_compiled_after_the_start(executor: CudaExecutor) -> None:
    """The first test, so that no other has compiled what the start forgot."""
    assert executor.compiles == 0
    everything = Sampling(0.9, 20, 0.95, 0.01, 3)
    for count in (1, 3, 7, SLOTS):
        generate(executor, list(range(count)), 3)
        generate(executor, list(range(count)), 3, sampling=everything)
        generate(executor, list(range(count)), 3, logprobs=3, banned_ids=[1, 2])
    for sampling in (GREEDY, Sampling(1.0, 0, 1.0, 0.0, 1), Sampling(1.0, 0, 1.0, 0.1, 1), everything):
        mixed_steps(executor, sampling)
    for length in (700, 999, 1024):
        ids = [place % 1000 for place in range(length)]
        run(executor, Row(0, 0, length, ids, list(range(1, 20)), True, GREEDY))
        run(executor, Row(0, length, 1, [], list(range(1, 20)), True, everything, logprobs=2))
    assert executor.compiles == 0
    TritonRouting()(torch.zeros(1, 11, device="cuda"), 3, True)
    assert executor.compiles == 1, "a kernel that no model has is counted"


@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_graphs_draw_what_eager_steps_draw(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Within a bucket all kernels are the same; in a padded one other tiles may round a near tie otherwise, and answers then part."""
    slots = list(range(count))
    captured = generate(executor, slots, 24)
    with monkeypatch.context() as patch:
        without_graphs(executor, patch)
        eager = generate(executor, slots, 24)
    same = sum(a == b for a, b in zip(captured, eager, strict=True))
    assert same >= count - max(1, count // 4), (captured, eager)


def test_steps_may_be_launched_ahead(executor: CudaExecutor) -> None:
    ahead, one_by_one = (generate(executor, [0, 4, 7, 9], 40, overlap=overlap) for overlap in (True, False))
    if next(kernel.backend for kernel in executor.info.kernels if kernel.operator == "moe") == "triton":
        assert ahead == one_by_one
    assert sum(a == b for a, b in zip(ahead, one_by_one, strict=True)) >= 3, "CUTLASS's experts add in no fixed order"
    assert len(set(map(tuple, ahead))) >= 3, "slots have answers of their own; all may soon repeat one token"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 20, 0.95, 0.01, 3)])
def test_padded_rows_write_to_no_page(executor: CudaExecutor, sampling: Sampling) -> None:
    slots = [1, 2, 5, 6, 8]  # Padded to six.
    for cache in executor._runner.caches:
        cache.zero_()
    torch.cuda.synchronize()
    for slot in slots:
        run(executor, row(slot, 0, PROMPTS[slot]))
    before = [cache.clone() for cache in executor._runner.caches]
    torch.cuda.synchronize()
    run(executor, *(row(slot, len(PROMPTS[slot]), [], sampling=sampling) for slot in slots))
    for old, new in zip(before, executor._runner.caches, strict=True):
        changed = (old != new).any(-1).any(2).any(1).nonzero().tolist()
        assert changed == [[1 + slot * PAGES_EACH + len(PROMPTS[slot]) // PAGE_SIZE, len(PROMPTS[slot]) % PAGE_SIZE] for slot in slots]


def count_replays(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> list[Sizes]:
    """The inputs of each graph that is replayed from now on."""
    replays: list[Sizes] = []
    replay = executor._graphs.replay

    def counted(step: PackedStep) -> CapturedStep:
        replays.append(step.sizes)
        return replay(step)

    monkeypatch.setattr(executor._graphs, "replay", counted)
    return replays


def mixed_steps(executor: CudaExecutor, sampling: Sampling) -> tuple[list[int], list[int]]:
    """Three decodes, a chunk that is not the last, one that is, and a whole prompt; then, by what that left, decodes and the rest."""
    for slot in (1, 4, 6):
        run(executor, row(slot, 0, PROMPTS[slot]))
    run(executor, row(9, 0, PROMPTS[9][:50], samples=False))
    decodes = [row(slot, len(PROMPTS[slot]), [], sampling=sampling) for slot in (1, 4, 6)]
    chunks = [row(8, 0, PROMPTS[8][:30], samples=False), row(9, 50, PROMPTS[9][50:], sampling=sampling), row(3, 0, PROMPTS[3])]
    first = executor.launch(StepPlan([*decodes, *chunks]))
    decodes = [row(slot, len(PROMPTS[slot]) + (slot in (1, 4, 6)), [], sampling=sampling) for slot in (1, 4, 6, 9, 3)]
    second = executor.launch(StepPlan([*decodes, row(8, 30, PROMPTS[8][30:])]))
    return first.wait().token_ids, second.wait().token_ids


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.9, 20, 0.95, 0.01, 3)])
def test_a_graph_with_chunks_draws_what_eager_steps_draw(
    executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch, sampling: Sampling
) -> None:
    with monkeypatch.context() as patch:
        replays = count_replays(executor, patch)
        captured = mixed_steps(executor, sampling)
    assert [sizes.mixed for sizes in replays] == [True] * 6
    with monkeypatch.context() as patch:
        without_graphs(executor, patch)
        eager = mixed_steps(executor, sampling)
    assert [len(ids) for ids in captured] == [5, 6] == [len(ids) for ids in eager]
    pairs = list(zip(captured[0] + captured[1], eager[0] + eager[1], strict=True))
    assert sum(a == b for a, b in pairs) >= len(pairs) - 2, "a near tie may fall either way, and then its next token"


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 100])
def test_padded_tokens_write_to_no_page(executor: CudaExecutor, length: int) -> None:
    run(executor, row(5, 0, PROMPTS[5]))
    before = [cache.clone() for cache in executor._runner.caches]
    last_S = executor._runner.last_token_id_S.clone()
    torch.cuda.synchronize()
    ids = list(range(7, 7 + length))
    assert run(executor, row(5, len(PROMPTS[5]), []), row(2, 30, ids, samples=False)).token_ids
    expected = {(1 + 2 * PAGES_EACH + place // PAGE_SIZE, place % PAGE_SIZE) for place in range(30, 30 + length)}
    expected |= {(1 + 5 * PAGES_EACH + len(PROMPTS[5]) // PAGE_SIZE, len(PROMPTS[5]) % PAGE_SIZE)}
    for old, new in zip(before, executor._runner.caches, strict=True):
        changed = {(page, slot) for page, slot in (old != new).any(-1).any(2).any(1).nonzero().tolist()}
        # What an earlier test wrote with the same ids may stay as it is.
        assert changed <= expected
    changed_slots = (executor._runner.last_token_id_S != last_S).nonzero().flatten().tolist()
    assert set(changed_slots) <= {5, SLOTS}


def test_contexts_outgrow_a_graph(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes that pass 1024 tokens, beyond which wider graphs take over, and a chunk whose attention is too much for a graph."""
    ids = [(31 * place + place // 7) % 1000 for place in range(1021)]
    pages = list(range(1, 20))

    def generate_long() -> list[int]:
        drawn = run(executor, Row(0, 0, 1000, ids[:1000], pages, False, GREEDY)).token_ids
        drawn += run(executor, Row(0, 1000, 21, ids[1000:], pages, True, GREEDY)).token_ids
        return drawn + [run(executor, Row(0, 1021 + step, 1, [], pages, True, GREEDY)).token_ids[0] for step in range(8)]

    with monkeypatch.context() as patch:
        replays = count_replays(executor, patch)
        captured = generate_long()
    assert [(sizes.mixed, sizes.pages) for sizes in replays[1:]] == [(False, 16)] * 3 + [(False, 64)] * 5 and replays[0].mixed
    with monkeypatch.context() as patch:
        without_graphs(executor, patch)
        eager = generate_long()
    assert captured[:3] == eager[:3] and len(captured) == len(eager) == 9


def test_a_graph_that_draws_is_right_for_its_greedy_rows(executor: CudaExecutor) -> None:
    results = []
    for sampling in (GREEDY, Sampling(1.5, 0, 1.0, 0.0, 11)):
        for slot in (0, 1):
            run(executor, row(slot, 0, PROMPTS[slot]))
        results.append(run(executor, row(0, len(PROMPTS[0]), []), row(1, len(PROMPTS[1]), [], sampling=sampling)))
    assert results[0].token_ids[0] == results[1].token_ids[0]


def test_seeds_decide_draws(executor: CudaExecutor) -> None:
    draws = []
    for seed in (1, 1, 2, 3, 4, 5):
        run(executor, row(2, 0, PROMPTS[2]))
        draws.append(run(executor, row(2, len(PROMPTS[2]), [], sampling=Sampling(50.0, 0, 1.0, 0.0, seed))).token_ids[0])
    assert draws[0] == draws[1] and len(set(draws)) > 3


def test_the_sampler_draws_what_the_reference_draws(executor: CudaExecutor) -> None:
    torch.manual_seed(0)
    rows, device = 48, "cuda"
    logits_RV = (3 * torch.randn(rows, 1000, device=device)).to(torch.bfloat16)
    temperature_R = torch.tensor([0.0, 0.7, 1.3] * (rows // 3), device=device)
    top_k_R = torch.tensor([2**31 - 1, 5, 50, 2**31 - 1] * (rows // 4), dtype=torch.int32, device=device)
    top_p_R = torch.tensor([1.0, 0.9] * (rows // 2), device=device)
    min_p_R = torch.tensor([0.0, 0.0, 0.0, 0.05] * (rows // 4), device=device)
    seed_R = torch.randint(-(2**63), 2**63 - 1, (rows,), device=device)
    position_R = torch.arange(rows, dtype=torch.int32, device=device)
    inputs = (logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
    ours, reference = executor._runner.model.operators.sampling.sample_padded(*inputs), TorchSampling().sample_padded(*inputs)
    assert ours.dtype == torch.int64
    assert (ours == reference).sum() >= rows - 1, "a token at a filter's edge may fall either way"


def test_banned_ids_and_log_probabilities(executor: CudaExecutor) -> None:
    plain = run(executor, row(3, 0, PROMPTS[3], logprobs=4))
    entry = plain.logprobs[0]
    assert entry is not None and entry.top_ids[0] == plain.token_ids[0] and entry.top == sorted(entry.top, reverse=True)
    assert entry.chosen == pytest.approx(entry.top[0])
    run(executor, row(4, 0, PROMPTS[4]))
    banned = run(executor, row(4, len(PROMPTS[4]), []), row(3, 0, PROMPTS[3], banned_ids=entry.top_ids[:2], logprobs=1))
    assert banned.logprobs[0] is None and banned.token_ids[1] not in entry.top_ids[:2]
    run(executor, row(4, 0, PROMPTS[4]))
    again = run(executor, row(4, len(PROMPTS[4]), [], logprobs=0))
    assert again.token_ids[0] == banned.token_ids[0]


@pytest.mark.parametrize("graphs", [True, False])
def test_pages_are_copied_before_the_step(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """A slot goes on from a copy of another's page, launched right after the step that wrote it."""
    if not graphs:
        without_graphs(executor, monkeypatch)
    ids = PROMPTS[5]
    whole = executor.launch(StepPlan([row(5, 0, ids)]))
    copies = [(1 + 5 * PAGES_EACH, 1 + 7 * PAGES_EACH)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        forked = executor.launch(StepPlan([row(7, len(ids) - 1, ids[-1:])], copies=copies))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert forked.wait().token_ids == whole.wait().token_ids
    assert run(executor, row(7, len(ids), [])).token_ids == run(executor, row(5, len(ids), [])).token_ids


def test_chunks_that_are_not_the_last_draw_nothing(executor: CudaExecutor) -> None:
    whole = run(executor, row(8, 0, PROMPTS[8])).token_ids
    assert run(executor, row(8, 0, PROMPTS[8][:40], samples=False)).token_ids == []
    assert run(executor, row(8, 40, PROMPTS[8][40:])).token_ids == whole


def test_experts_are_counted_in_graphs(executor: CudaExecutor) -> None:
    """Against what the layers' choices in the graph's memory say after the step."""
    for slots in ([3], [0, 1, 2, 3, 4], list(range(11))):
        run(executor, *(row(slot, 0, PROMPTS[slot]) for slot in slots))
        counted = []
        for step in range(2 * STEPS):
            rows = [row(slot, len(PROMPTS[slot]) + step % 64, []) for slot in slots]
            if (distinct := run(executor, *rows).distinct_experts) is not None:
                graph = executor._graph(rows, executor._slots.measure(rows))
                assert graph is not None
                chosen = executor._graphs._graphs[graph, True].chosen_experts
                each = [len(set(ids_TK[: len(slots)].flatten().tolist())) for ids_TK in chosen]
                assert len(each) == 3 and distinct == pytest.approx(sum(each) / 3)
                counted.append(distinct)
        assert len(counted) == 2
        assert counted == [4.0, 4.0] if len(slots) == 1 else all(4.0 < distinct <= 16.0 for distinct in counted)


def test_nothing_waits_for_the_device(executor: CudaExecutor) -> None:
    """PyTorch itself refuses to synchronize while a step of each kind is launched."""
    run(executor, row(0, 0, PROMPTS[0]))
    plans = [
        [row(0, len(PROMPTS[0]), [])],
        [row(0, len(PROMPTS[0]) + 1, [], sampling=Sampling(0.8, 0, 0.9, 0.0, 1))],
        [row(0, len(PROMPTS[0]) + 2, []), row(1, 0, PROMPTS[1])],
        [row(0, len(PROMPTS[0]) + 3, []), *(row(slot, 0, (PROMPTS[9] * 3)[:250]) for slot in (2, 3, 4))],
        [row(0, 0, PROMPTS[0], sampling=EDITED, history=PROMPTS[0], prompt_tokens=2, prompt_logprobs=2, next_ids=PROMPTS[0][1:])],
        [row(0, len(PROMPTS[0]), [], sampling=EDITED, banned_ids=[1], banned_after=[(2, 3)], allowed=b"\xff" * 128, logprobs=1)],
    ]
    drawn = []
    for part in (plans[:4], plans[4:]):
        torch.cuda.set_sync_debug_mode("error")
        try:
            tickets = [executor.launch(StepPlan(rows)) for rows in part]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        drawn += [len(ticket.wait().token_ids) for ticket in tickets]
    assert drawn == [1, 1, 2, 4, 1, 1]


def test_edits_follow_the_definition(executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over steps launched without a look at the ids before them: what occurred is counted, and bans are matched, on the device."""
    slots = [0, 1, 2, 3]
    hows = [EDITED, GREEDY, replace(EDITED, temperature=0.8, seed=3), replace(EDITED, repetition_penalty=1.0, logit_bias=[])]
    drawn_from: list[tuple[torch.Tensor, torch.Tensor]] = []
    apply = executor._editor.apply

    def recorded(logits_NV: torch.Tensor, edits: Edits) -> torch.Tensor:
        drawn_from.append((logits_NV, apply(logits_NV, edits)))
        return drawn_from[-1][1]

    monkeypatch.setattr(executor._editor, "apply", recorded)
    after = [(token, (7 * token) % 1000) for token in range(1000)]

    def plan(step: int) -> StepPlan:
        """The prompts, the last two tokens of which count as output, and then decodes."""
        rows = []
        for slot, how in zip(slots, hows, strict=True):
            fields: dict[str, Any] = {"sampling": how, "banned_ids": [slot, 5], "banned_after": after}
            if not step:
                fields |= {"history": PROMPTS[slot], "prompt_tokens": len(PROMPTS[slot]) - 2}
            rows.append(row(slot, len(PROMPTS[slot]) + step - 1 if step else 0, [] if step else PROMPTS[slot], **fields))
        return StepPlan(rows)

    tickets = [executor.launch(plan(step)) for step in range(4)]
    ids = [ticket.wait().token_ids for ticket in tickets]
    for step, (given_NV, edited_NV) in enumerate(drawn_from):
        for place, (slot, how) in enumerate(zip(slots, hows, strict=True)):
            sequence = PROMPTS[slot] + [of_step[place] for of_step in ids[:step]]
            prompt, output = sequence[: len(PROMPTS[slot]) - 2], sequence[len(PROMPTS[slot]) - 2 :]
            banned = {slot, 5, (7 * sequence[-1]) % 1000}
            expected_V = torch.tensor(edited(given_NV[place].tolist(), how, prompt, output, banned, set(range(1000))))
            torch.testing.assert_close(edited_NV[place].float().cpu(), expected_V, rtol=1e-4, atol=1e-3)
            assert ids[step][place] not in banned
            if not how.temperature:
                assert edited_NV[place].argmax().item() == ids[step][place]


def test_prompt_logprobs_are_those_of_each_beginning(executor: CudaExecutor) -> None:
    """In chunks; and each agrees with what is said of a token drawn after the same beginning, up to rounding in half
    precision, which is 0.06 for logits of 16 and more."""
    ids = PROMPTS[9][:40]
    first = run(executor, row(9, 0, ids[:33], samples=False, prompt_logprobs=2, next_ids=ids[1:34]), row(2, 0, PROMPTS[2], logprobs=0))
    second = run(executor, row(9, 33, ids[33:], prompt_logprobs=0, next_ids=ids[34:]))
    assert [len(entries) for entries in (first.prompt_logprobs[0], second.prompt_logprobs[0])] == [33, 6]
    assert len(first.token_ids) == len(second.token_ids) == 1 and first.logprobs[0] is not None
    for length in (1, 7, 33, 36):
        drawn = run(executor, row(9, 0, ids[:length], logprobs=20)).logprobs[0]
        entry = (first.prompt_logprobs[0] + second.prompt_logprobs[0])[length - 1]
        assert drawn is not None
        assert entry.top == pytest.approx(drawn.top[: len(entry.top)], abs=0.2)
        if ids[length] in drawn.top_ids:
            assert entry.chosen == pytest.approx(drawn.top[drawn.top_ids.index(ids[length])], abs=0.2)


def test_the_pool_takes_what_memory_is_left(model_dir: Path) -> None:
    lines: list[str] = []
    used, total = used_bytes(), torch.cuda.mem_get_info()[1]
    share = (6 << 30) / total
    executor = build(model_dir, f"cache.gpu_memory_fraction={share:.4f}", lines=lines)
    page_bytes = 2 * 3 * 2 * 128 * 2 * PAGE_SIZE  # Keys and values, layers, heads, head dim, bfloat16.
    assert 1 << 30 < executor.info.pages * page_bytes < 6 << 30
    assert torch.cuda.mem_get_info()[0] > total - used - (7 << 30)
    assert any("KV pool" in line for line in lines) and any("graphs captured" in line for line in lines)
    assert run(executor, row(0, 0, PROMPTS[0])).token_ids
    executor.close()
