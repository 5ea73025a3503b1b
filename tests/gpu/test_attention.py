"""Each attention backend against the float32 reference, on random ragged steps with poisoned outputs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.kernels import support
from inference_service.kernels.attention import SplitAttention, StepLayout
from inference_service.kernels.attention_torch import TorchDecode, TorchPrefill
from inference_service.kernels.flashinfer_fa3 import GatheredPlan, gathered

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCE = 1e-2
"""Of the norm of the difference to the reference's, in bfloat16."""
PAGES = 256


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int


QWEN = Shape(32, 4, 128, 64)
SMOLLM = Shape(9, 3, 64, 64)
DECODES = [[1], [64], [1, 63, 64, 65, 1000, 2, 129], [*range(1, 1200, 37)], [*range(1, 257)]]
CHUNKS = [
    [(1, 1)],
    [(5, 5), (64, 64), (130, 130)],
    [(16, 100), (3, 640), (200, 200), (1, 77), (64, 128), (65, 700)],
    [(512, 512)],
    [(300, 1000)],
    [(1, 5)] * 40,
]
GATHERED = [[(1024, 1024)], [(600, 1000), (1, 5), (500, 777), (64, 64)], [(100, 3000), (1500, 1500)]]
"""Chunks of so many tokens that FA3 gathers their contexts."""


def backend(operator: str, name: str) -> Any:
    return next(row for row in support.rows(operator) if row.backend == name).make()


def make_cache(shape: Shape) -> Tensor:
    return torch.randn(PAGES, 2, shape.kv_heads, shape.page_size, shape.head_dim, device="cuda", dtype=torch.bfloat16)


def make_query(layout: StepLayout, shape: Shape) -> Tensor:
    return torch.randn(sum(layout.lengths), shape.heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)


def make_layout(shape: Shape, decodes: list[int], chunks: list[tuple[int, int]], width: int = 0) -> StepLayout:
    """Rows whose pages are shuffled, and shared by rows where the cache would be too small; int32 as the GPU's executor packs them."""
    lengths, contexts = [1] * len(decodes) + [length for length, _ in chunks], decodes + [context for _, context in chunks]
    width = max(width, -(-max(contexts) // shape.page_size))
    pages_RM = torch.stack([torch.randperm(PAGES)[:width] for _ in contexts])
    positions = [position for length, context in zip(lengths, contexts, strict=True) for position in range(context - length, context)]
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    positions_T, row_T, contexts_R = (torch.tensor(values).int().cuda() for values in (positions, rows, contexts))
    return StepLayout(len(decodes), lengths, contexts, positions_T, row_T, pages_RM.int().cuda(), contexts_R)


def reference(q_THD: Tensor, kv_P2HSD: Tensor, layout: StepLayout) -> Tensor:
    attention = SplitAttention(TorchDecode(), TorchPrefill())
    layout = replace(layout, pages_RM=layout.pages_RM.long(), contexts_R=layout.contexts_R.long())
    kv = kv_P2HSD.float()
    return attention(q_THD.float(), kv, attention.plan(layout, kv, q_THD.shape[1]))


def run(attention: Any, q_THD: Tensor, kv_P2HSD: Tensor, layout: StepLayout) -> Tensor:
    o_THD = torch.full_like(q_THD, float("nan"))
    attention(q_THD, kv_P2HSD, attention.plan(layout, kv_P2HSD, q_THD.shape[1]), o_THD)
    return o_THD


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert ours.isfinite().all()
    assert ((ours.float() - expected).norm() / expected.norm()).item() < TOLERANCE
    # No single token may hide in the norm of all.
    worst = ((ours.float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max().item()
    assert worst < 2 * TOLERANCE


@pytest.mark.parametrize("contexts", DECODES, ids=len)
@pytest.mark.parametrize("name", ["triton", "xqa", "fa2"])
@pytest.mark.parametrize("shape", [QWEN, replace(QWEN, page_size=16), replace(QWEN, kv_heads=32), SMOLLM], ids=str)
def test_decode(name: str, shape: Shape, contexts: list[int]) -> None:
    kv, layout = make_cache(shape), make_layout(shape, contexts, [])
    q = make_query(layout, shape)
    assert_near(run(backend("attention_decode", name), q, kv, layout), reference(q, kv, layout))


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("name", ["fa2", "fa3", "fmha_v2"])
@pytest.mark.parametrize("shape", [QWEN, replace(QWEN, page_size=16), SMOLLM], ids=str)
def test_prefill(name: str, shape: Shape, chunks: list[tuple[int, int]]) -> None:
    kv, layout = make_cache(shape), make_layout(shape, [], chunks)
    q = make_query(layout, shape)
    assert_near(run(backend("attention_prefill", name), q, kv, layout), reference(q, kv, layout))


@pytest.mark.parametrize("chunks", GATHERED, ids=str)
@pytest.mark.parametrize("shape", [QWEN, replace(QWEN, page_size=16), SMOLLM], ids=str)
def test_fa3_of_gathered_contexts(shape: Shape, chunks: list[tuple[int, int]]) -> None:
    attention, kv, layout = backend("attention_prefill", "fa3"), make_cache(shape), make_layout(shape, [7, 300], chunks)
    q = make_query(layout, shape)
    assert isinstance(attention.plan(layout, kv, shape.heads), GatheredPlan)
    gathered(kv.device).fill_(255)  # NaN, as bfloat16: what lies behind the contexts must not be read
    step = SplitAttention(backend("attention_decode", "triton"), attention)
    assert_near(step(q, kv, step.plan(layout, kv, shape.heads)), reference(q, kv, layout))


@pytest.mark.parametrize("name", ["fa2", "fa3", "triton"])
def test_a_row_that_is_no_number_leaves_the_others_as_they_were(name: str) -> None:
    attention, kv = backend("attention_prefill", name), make_cache(QWEN)
    layout, spoilt = make_layout(QWEN, [], [(1000, 1000), (90, 200), (70, 70)]), slice(1000, 1090)
    pages_RM = torch.randperm(PAGES)[: layout.pages_RM.numel()].view(layout.pages_RM.shape)
    layout = replace(layout, pages_RM=pages_RM.int().cuda())
    q = make_query(layout, QWEN)
    expected = run(attention, q, kv, layout)
    for value in (float("nan"), float("inf")):
        kv[pages_RM[1].cuda()] = value
        o = run(attention, q, kv, layout)
        assert torch.equal(o[: spoilt.start], expected[: spoilt.start]) and torch.equal(o[spoilt.stop :], expected[spoilt.stop :])


@pytest.mark.parametrize("heads", [32, 64])
def test_workspace_is_enough_however_contexts_are_split(heads: int) -> None:
    """Tiles times parts of a context are at most two a multiprocessor and KV head; some of these lengths come near."""
    shape, attention = replace(QWEN, heads=heads), backend("attention_prefill", "fa2")
    kv = make_cache(shape)
    for length in range(16, 545, 24):
        layout = make_layout(shape, [], [(length, 4096)])
        q = make_query(layout, shape)
        assert_near(run(attention, q, kv, layout), reference(q, kv, layout))


@pytest.mark.parametrize("prefill", ["fa2", "fa3", "fmha_v2"])
@pytest.mark.parametrize("decode", ["triton", "xqa", "fa2"])
def test_a_mixed_step(decode: str, prefill: str) -> None:
    attention = SplitAttention(backend("attention_decode", decode), backend("attention_prefill", prefill))
    kv = make_cache(QWEN)
    for decodes, chunks in itertools.product(([], [7, 700, 64]), ([], [(40, 40), (5, 300)])):
        if decodes or chunks:
            layout = make_layout(QWEN, decodes, chunks)
            q = make_query(layout, QWEN)
            assert_near(attention(q, kv, attention.plan(layout, kv, QWEN.heads)), reference(q, kv, layout))


@pytest.mark.parametrize(
    ("operator", "name", "counts"),
    [
        ("attention_decode", "fa2", (1, 2, 3, 1, 4)),
        ("attention_prefill", "fa2", (1, 2, 3, 1, 4)),
        ("attention_prefill", "fa3", (1, 2, 1, 2, 1)),
        ("attention_prefill", "fa3", (3, 4, 5, 3, 4)),  # gathered
    ],
)
def test_plans_made_while_the_device_lags_do_not_spoil_each_other(operator: str, name: str, counts: tuple[int, ...]) -> None:
    decodes = operator == "attention_decode"
    attention, kv = backend(operator, name), make_cache(QWEN)
    steps = [([300, 5, 64] * count, []) if decodes else ([], [(400 * count, 400 * count), (9, 500)]) for count in counts]
    layouts = [make_layout(QWEN, *step) for step in steps]
    queries = [make_query(layout, QWEN) for layout in layouts]
    run(attention, queries[0], kv, layouts[0])
    torch.cuda.synchronize()
    outputs = []
    for q, layout in zip(queries, layouts, strict=True):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        outputs.append(run(attention, q, kv, layout))
    for q, layout, output in zip(queries, layouts, outputs, strict=True):
        assert_near(output, reference(q, kv, layout))


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_xqa_in_a_graph_reads_what_changes_on_the_device(batch: int) -> None:
    attention, kv = backend("attention_decode", "xqa"), make_cache(QWEN)
    layout = make_layout(QWEN, [1] * batch, [], width=32)
    q = make_query(layout, QWEN)
    o = torch.full_like(q, float("nan"))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        attention(q, kv, attention.plan(layout, kv, QWEN.heads), o)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            attention(q, kv, attention.plan(layout, kv, QWEN.heads), o)
    torch.cuda.synchronize()
    for seed in range(3):
        torch.manual_seed(seed)
        contexts = torch.randint(1, 32 * QWEN.page_size + 1, (batch,)).tolist()
        changed = make_layout(QWEN, contexts, [], width=32)
        layout.contexts_R.copy_(changed.contexts_R)
        layout.pages_RM.copy_(changed.pages_RM)
        q.copy_(torch.randn_like(q))
        kv.copy_(torch.randn_like(kv))
        o.fill_(float("nan"))
        graph.replay()
        assert_near(o, reference(q, kv, changed))
