"""Attention to latents and DeepSeek's routing on the GPU against float32 references, at the sizes of DeepSeek-V3 and Moonlight."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.kernels import support
from inference_service.kernels.attention import AttentionSpec, StepLayout
from inference_service.kernels.flashinfer_mla import EXPANDED_TOKENS, FEW_ROWS
from inference_service.kernels.grouped_routing import FlashInferGroupedRouting, GroupedSpec, TorchGroupedRouting, TritonGroupedRouting
from inference_service.kernels.input_routing import TorchInputRouting, TritonInputRouting
from inference_service.kernels.mla import UpProjection
from inference_service.kernels.mla_append import MlaAppend, TorchMlaAppend, TritonMlaAppend
from inference_service.kernels.mla_torch import torch_mla_mixed
from tests.gpu.test_attention import CHUNKS, DECODES, PAGES, QWEN, assert_near, make_layout
from tests.unit.test_routing import SPECS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
SPEC = AttentionSpec(scale=0.1)


def backend(operator: str, name: str) -> Any:
    return next(row for row in support.rows(operator) if row.backend == name).make()


def cache() -> Tensor:
    return torch.randn(PAGES, 1, 1, QWEN.page_size, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)


def query(tokens: int, heads: int) -> Tensor:
    """A part of a wider product, as where a model has no compressed queries."""
    product = torch.randn(tokens, heads * (NOPE + ROPE) + LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    return product[:, : -LATENT - ROPE].view(tokens, heads, NOPE + ROPE)


def projection(heads: int) -> UpProjection:
    return UpProjection(torch.randn(heads, NOPE + VALUE, LATENT, device="cuda", dtype=torch.bfloat16) / LATENT**0.5, NOPE)


def attended(q_THL: Tensor, q_THR: Tensor, kv: Tensor, layout: StepLayout) -> Tensor:
    """Row by row, in float32."""
    outputs, page_size = [], kv.shape[3]
    for q, position, row in zip(torch.cat((q_THL, q_THR), dim=-1).float(), layout.positions_T.tolist(), layout.row_T.tolist(), strict=True):
        pages = layout.pages_RM[row, : position // page_size + 1].long()
        k = kv[pages, 0, 0].flatten(0, 1)[: position + 1].float()
        outputs.append((q @ k.T * SPEC.scale_for(0)).softmax(-1) @ k[:, :LATENT])
    return torch.stack(outputs)


@pytest.mark.parametrize("heads", [16, 128, 20])
@pytest.mark.parametrize("contexts", DECODES, ids=len)
@pytest.mark.parametrize("name", ["triton", "fa2", "fa3", "triton+fa3"])
def test_decode(name: str, contexts: list[int], heads: int) -> None:
    attention, kv, layout = backend("mla_decode", name), cache(), make_layout(QWEN, contexts, [])
    q_THL = torch.randn(heads, len(contexts), LATENT, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    q_THR = query(len(contexts), heads)[..., NOPE:]
    o_THL = torch.full_like(q_THL, float("nan"))
    attention(q_THL, q_THR, kv, attention.plan(layout, kv, heads, SPEC), o_THL)
    assert_near(o_THL, attended(q_THL, q_THR, kv, layout))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("batch", [1, FEW_ROWS, 6, 64])
@pytest.mark.parametrize("name", ["fa2", "fa3", "triton+fa3"])
def test_a_replayed_kernel_does_as_was_planned_before(name: str, batch: int, heads: int) -> None:
    """Steps queued while the device lags: contexts grow into new pages, then are others; and a row less each, which is padded."""
    attention, kv, width = backend("mla_decode", name), cache(), 32
    contexts = [[(61 + 37 * row) % 1500 + 1 + step for row in range(batch)] for step in range(4)]
    contexts += [torch.randint(1, width * QWEN.page_size + 1, (max(1, batch - less),)).tolist() for less in range(4)]
    steps = [make_layout(QWEN, each, [], width) for each in contexts]
    queries = [(torch.randn(heads, batch, LATENT, device="cuda").bfloat16(), query(batch, heads)[..., NOPE:]) for _ in steps]
    fixed = make_layout(QWEN, [1] * batch, [], width)
    q_THL, q_THR = torch.empty_like(queries[0][0]).transpose(0, 1), torch.empty_like(queries[0][1])
    # One row more than the graph's, which must stay as it is.
    o = torch.full((heads, batch + 1, LATENT), float("nan"), device="cuda", dtype=torch.bfloat16)
    o_THL = o.transpose(0, 1)[:batch]

    def run() -> None:
        attention(q_THL, q_THR, kv, attention.plan(replace(fixed, captured=True), kv, heads, SPEC), o_THL)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    outputs: list[Tensor] = []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        attention.plan_replay(fixed, kv, heads, SPEC)
        run()
        with torch.cuda.graph(graph, stream=stream):
            run()
        for step, (q_HTL, rotated) in zip(steps, queries, strict=True):
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            fixed.pages_RM[: len(step.lengths)].copy_(step.pages_RM)
            fixed.positions_T[: len(step.lengths)].copy_(step.positions_T)
            q_THL.copy_(q_HTL.transpose(0, 1))
            q_THR.copy_(rotated)
            attention.plan_replay(replace(step, pages_RM=fixed.pages_RM), kv, heads, SPEC)
            graph.replay()
            outputs.append(o_THL.clone())
    torch.cuda.synchronize()
    for step, (q_HTL, rotated), output in zip(steps, queries, outputs, strict=True):
        rows = len(step.lengths)
        assert_near(output[:rows], attended(q_HTL.transpose(0, 1)[:rows], rotated[:rows], kv, step))
        assert output.isfinite().all()
    assert o[:, batch].isnan().all()


@pytest.mark.parametrize("name", ["fa2", "fa3", "triton+fa3"])
def test_graphs_of_different_sizes_take_turns(name: str) -> None:
    """Their plans lie in the same memory, and are made while the device lags behind by graphs of other sizes."""
    attention, kv, heads, width = backend("mla_decode", name), cache(), 16, 32
    sizes = [64, 6, FEW_ROWS]
    fixed = {batch: make_layout(QWEN, [1] * batch, [], width) for batch in sizes}
    q_THL, q_THR = torch.randn(64, heads, LATENT, device="cuda").bfloat16(), query(64, heads)[..., NOPE:]
    o_THL, graphs = torch.empty_like(q_THL), {batch: torch.cuda.CUDAGraph() for batch in sizes}
    steps = [make_layout(QWEN, torch.randint(1, width * QWEN.page_size + 1, (batch,)).tolist(), [], width) for batch in sizes * 4]
    outputs: list[Tensor] = []

    def run(batch: int) -> None:
        plan = attention.plan(replace(fixed[batch], captured=True), kv, heads, SPEC)
        attention(q_THL[:batch], q_THR[:batch], kv, plan, o_THL[:batch])

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for batch, graph in graphs.items():
            attention.plan_replay(fixed[batch], kv, heads, SPEC)
            run(batch)
            with torch.cuda.graph(graph, stream=stream):
                run(batch)
        for step in steps:
            batch = len(step.lengths)
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
            fixed[batch].pages_RM.copy_(step.pages_RM)
            fixed[batch].positions_T.copy_(step.positions_T)
            attention.plan_replay(replace(step, pages_RM=fixed[batch].pages_RM), kv, heads, SPEC)
            graphs[batch].replay()
            outputs.append(o_THL[:batch].clone())
    torch.cuda.synchronize()
    for step, output in zip(steps, outputs, strict=True):
        assert_near(output, attended(q_THL[: len(output)], q_THR[: len(output)], kv, step))


def expanded(q_THQ: Tensor, kv: Tensor, layout: StepLayout, up: UpProjection) -> Tensor:
    """Row by row and expanded, in float32."""
    outputs, page_size, begin = [], kv.shape[3], 0
    wide = UpProjection(up.weight_HXL.float(), NOPE)
    for row, (length, context) in enumerate(zip(layout.lengths, layout.contexts, strict=True)):
        pages = layout.pages_RM[row, : -(-context // page_size)].long()
        k_KHQ, v_KHV = wide.expand(kv[pages, 0, 0].flatten(0, 1)[:context].float())
        hidden = torch.ones(length, context, dtype=torch.bool, device="cuda").triu_(context - length + 1)
        scores = torch.einsum("thq,khq->htk", q_THQ[begin : begin + length].float(), k_KHQ) * SPEC.scale_for(0)
        outputs.append(torch.einsum("htk,khv->thv", scores.masked_fill(hidden, float("-inf")).softmax(-1), v_KHV))
        begin += length
    return torch.cat(outputs)


@pytest.mark.parametrize("chunks", [*CHUNKS, [(100, 9000), (7, 9000)]], ids=str)
@pytest.mark.parametrize("name", ["triton", "fa2", "fa3", "torch"])
def test_prefill(name: str, chunks: list[tuple[int, int]]) -> None:
    """The last one is too long to be expanded as a whole."""
    assert sum(context for _, context in [(100, 9000), (7, 9000)]) > EXPANDED_TOKENS
    attention, kv, layout, up = backend("mla_prefill", name), cache(), make_layout(QWEN, [], chunks), projection(16)
    q = query(sum(layout.lengths), 16)
    o_THV = torch.full((len(q), 16, VALUE), float("nan"), device="cuda", dtype=torch.bfloat16)
    attention(q, kv, attention.plan(layout, kv, 16, SPEC), up, o_THV)
    assert_near(o_THV, expanded(q, kv, layout, up))


@pytest.mark.parametrize("name", ["triton", "fa2", "fa3"])
def test_a_row_that_is_no_number_leaves_the_others_as_they_were(name: str) -> None:
    attention, kv, up = backend("mla_prefill", name), cache(), projection(16)
    layout = make_layout(QWEN, [], [(200, 200), (9, 90), (70, 70)])
    pages_RM = torch.randperm(PAGES)[: layout.pages_RM.numel()].view(layout.pages_RM.shape)
    layout, q = replace(layout, pages_RM=pages_RM.int().cuda()), query(279, 16)

    def run() -> Tensor:
        o_THV = torch.full((len(q), 16, VALUE), float("nan"), device="cuda", dtype=torch.bfloat16)
        attention(q, kv, attention.plan(layout, kv, 16, SPEC), up, o_THV)
        return o_THV

    expected = run()
    kv[pages_RM[1].cuda()] = float("nan")
    o_THV = run()
    assert torch.equal(o_THV[:200], expected[:200]) and torch.equal(o_THV[209:], expected[209:])


def test_a_mixed_step() -> None:
    mixed, reference = backend("mla_mixed", "triton"), torch_mla_mixed()
    kv, layout, up = cache(), make_layout(QWEN, [7, 700, 64], [(40, 40), (5, 300)]), projection(16)
    q = query(sum(layout.lengths), 16)
    wide = UpProjection(up.weight_HXL.float(), NOPE)
    wanted = reference(q.float(), kv.float(), reference.plan(layout, kv, 16, SPEC), wide)
    assert_near(mixed(q, kv, mixed.plan(layout, kv, 16, SPEC), up), wanted)


@pytest.mark.parametrize("heads", [16, 128])
def test_append(heads: int) -> None:
    layout = make_layout(QWEN, [1, 64, 65, 900], [(40, 40), (5, 300)])
    norm, table = torch.randn(LATENT, device="cuda").bfloat16(), torch.randn(1024, ROPE, device="cuda")
    kv_TD = torch.randn(len(layout.positions_T), LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    given = query(len(kv_TD), heads)

    def run(append: MlaAppend, q: Tensor) -> tuple[Tensor, Tensor]:
        kv = torch.zeros(PAGES, 1, 1, QWEN.page_size, LATENT + ROPE, device="cuda", dtype=q.dtype)
        append(q, kv_TD.to(q.dtype, copy=True), norm.to(q.dtype), 1e-6, kv, append.plan(layout, kv, table))
        return q, kv

    (wanted_q, wanted_kv), (q, kv) = run(TorchMlaAppend(), given.float()), run(TritonMlaAppend(), given)
    assert_near(q, wanted_q)
    assert ((kv.float() - wanted_kv).norm() / wanted_kv.norm()).item() < 1e-2


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("tokens", [1, 7, 256, 4099])
def test_grouped_routing(spec: GroupedSpec, tokens: int) -> None:
    logits = torch.randn(tokens, spec.experts, device="cuda") * 2
    bias = torch.randn(spec.experts, device="cuda") if spec.sigmoid else None
    wanted_ids, wanted = TorchGroupedRouting()(logits, bias, spec)
    here = support.Setting("sm_90", torch.bfloat16, 192, 16, 64, {"flashinfer": "0.6.13", "cuda": "13.0"}, grouped=spec)
    row = next(row for row in support.rows("grouped_routing") if row.backend == "flashinfer")
    for routing in [TritonGroupedRouting()] + ([] if row.refusal(here) else [FlashInferGroupedRouting()]):
        ids, weights = routing(logits, bias, spec)
        order, wanted_order = ids.argsort(), wanted_ids.argsort()
        same = (ids.gather(1, order) == wanted_ids.gather(1, wanted_order)).all(1)
        # The exponential's last bit may decide between near ties.
        assert same.float().mean() > 0.999
        torch.testing.assert_close(weights.gather(1, order)[same], wanted.gather(1, wanted_order)[same], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 300])
def test_input_routing(tokens: int) -> None:
    logits, x = torch.randn(tokens, 16, device="cuda"), torch.randn(tokens, 5120, device="cuda", dtype=torch.bfloat16)
    (ids, y), (wanted_ids, wanted) = TritonInputRouting()(logits, x), TorchInputRouting()(logits, x.float())
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(y.float(), wanted, rtol=1e-2, atol=1e-2)
