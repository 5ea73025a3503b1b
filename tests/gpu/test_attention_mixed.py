"""The own attention of whole steps against the float32 reference, eager and in a CUDA graph, on poisoned outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference_service.kernels.attention import StepLayout
from inference_service.kernels.attention_mixed import TorchPagedAttention, TritonPagedAttention
from tests.gpu.test_attention import QWEN, SMOLLM, Shape, assert_near, make_cache, make_layout, make_query, reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [QWEN, SMOLLM, replace(QWEN, page_size=16), replace(SMOLLM, page_size=16), replace(QWEN, page_size=48), replace(QWEN, kv_heads=32)]
STEPS: list[tuple[list[int], list[tuple[int, int]]]] = [
    ([1], []),
    ([1000], []),
    ([1, 63, 64, 65, 1000, 2, 129], []),
    ([*range(1, 1200, 37)], []),
    ([*range(1, 257)], []),
    ([], [(1, 1)]),
    ([], [(16, 100), (3, 640), (200, 200), (1, 77)]),
    ([7, 700, 64], [(40, 40), (5, 300)]),
    ([300] * 64, [(512, 1000)]),
]


def run(q_THD: Tensor, kv_P2HSD: Tensor, layout: StepLayout, splits: int | None = None) -> Tensor:
    attention = TritonPagedAttention()
    plan = attention.plan(layout, kv_P2HSD, q_THD.shape[1])
    plan = plan if splits is None else replace(plan, splits=splits)
    poison = torch.full((2, *q_THD.shape), float("nan"), dtype=q_THD.dtype, device="cuda")
    del poison  # The allocator gives its memory to what comes next.
    return attention(q_THD, kv_P2HSD, plan)


@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step(shape: Shape, step: tuple[list[int], list[tuple[int, int]]]) -> None:
    kv, layout = make_cache(shape), make_layout(shape, *step)
    q = make_query(layout, shape)
    expected = reference(q, kv, layout)
    assert_near(run(q, kv, layout), expected)
    assert_near(run(q, kv, layout, 8), expected)


@pytest.mark.parametrize("splits", [1, 2, 64])
def test_padded_tokens_are_zeros_and_read_nothing(splits: int) -> None:
    kv, layout = make_cache(QWEN), make_layout(QWEN, [100, 5], [(6, 70)])
    q = make_query(layout, QWEN)
    expected = reference(q, kv, layout)
    padded = torch.tensor([1, 4, 5], device="cuda")
    layout.positions_T[padded] = -1
    layout.row_T[padded] = 1
    layout.pages_RM[1] = 1 << 30
    o = run(q, kv, layout, splits)
    assert not o[padded].any()
    others = [token for token in range(len(o)) if token not in (1, 4, 5)]
    assert_near(o[others], expected[others])


@pytest.mark.parametrize("splits", [1, 64])
def test_a_twin_gets_what_the_other_gets(splits: int) -> None:
    kv, layout = make_cache(QWEN), make_layout(QWEN, [3000, 5], [(6, 70)])
    q = make_query(layout, QWEN)
    layout.row_T[3], layout.positions_T[3] = 0, -1 - 2999
    q[3] = q[0]
    o = run(q, kv, layout, splits)
    assert o[0].any() and torch.equal(o[0], o[3])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("page_size", [16, 64])
def test_slots_beyond_the_context_may_be_nan(page_size: int, splits: int) -> None:
    shape = replace(QWEN, page_size=page_size)
    layout = make_layout(shape, [5, 130, 64], [(3, 33)])
    layout.pages_RM.copy_(torch.randperm(256)[: layout.pages_RM.numel()].view(layout.pages_RM.shape))
    kv, q = make_cache(shape), make_query(layout, shape)
    expected = reference(q, kv, layout)
    for row, context in enumerate(layout.contexts):
        pages = layout.pages_RM[row].tolist()
        for position in range(context, len(pages) * page_size):
            kv[pages[position // page_size], :, :, position % page_size] = float("nan")
    assert_near(run(q, kv, layout, splits), expected)


@pytest.mark.parametrize("tokens", [1, 24, 96, 320])
def test_in_a_graph_it_reads_what_changes_on_the_device(tokens: int) -> None:
    kv, width = make_cache(QWEN), 16
    attention, plain = TritonPagedAttention(), TorchPagedAttention()
    layout = make_layout(QWEN, [1] * tokens, [], width=width)
    q = make_query(layout, QWEN)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        attention(q, kv, attention.plan(layout, kv, QWEN.heads))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            o = attention(q, kv, attention.plan(layout, kv, QWEN.heads))
    torch.cuda.synchronize()
    for seed in range(3):
        torch.manual_seed(seed)
        # Any mixture: rows of their own, rows that share, and padding.
        layout.positions_T.copy_(torch.randint(-1, width * QWEN.page_size, (tokens,)))
        layout.positions_T[0] = seed
        layout.row_T.copy_(torch.randint(0, tokens, (tokens,)))
        layout.pages_RM.copy_(torch.randint(0, len(kv), layout.pages_RM.shape))
        q.copy_(torch.randn_like(q))
        kv.copy_(torch.randn_like(kv))
        o.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        there = (layout.positions_T >= 0).nonzero().flatten()
        assert not o[layout.positions_T < 0].any()
        for some in torch.split(there, 32):
            part = replace(layout, positions_T=layout.positions_T[some], row_T=layout.row_T[some])
            assert_near(o[some], plain(q[some].float(), kv.float(), plain.plan(part, kv, QWEN.heads)))
