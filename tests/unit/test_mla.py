"""Attention to latents: absorbed against expanded, and the own kernels against the references, run by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service import kernels
from inference_service.kernels.attention import AttentionSpec, StepLayout
from inference_service.kernels.attention_mixed import PagedPlan
from inference_service.kernels.flashinfer_mla import FEW_ROWS, FlashInferLatent, TritonOrFa3Latent
from inference_service.kernels.mla import AbsorbedRows, SplitMla, UpProjection
from inference_service.kernels.mla_append import MlaAppend, TorchMlaAppend, TritonMlaAppend
from inference_service.kernels.mla_torch import TorchLatentDecode, TorchLatentPaged, TorchMlaPrefill, torch_mla_mixed

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU")
LATENT, NOPE, ROPE, VALUE = 32, 24, 16, 20
SPEC = AttentionSpec(scale=0.3)
LENGTHS, CONTEXTS = [1, 1, 1, 3, 2, 5], [1, 70, 130, 10, 130, 5]


def layout_of(decodes: int, lengths: list[int], contexts: list[int], page_size: int) -> StepLayout:
    """Rows with pages of their own, shuffled; the table is part of a wider one."""
    torch.manual_seed(0)
    width = -(-192 // page_size)
    pages_RM = F.pad(torch.randperm(len(lengths) * width).view(len(lengths), width), (0, 3))[:, :width]
    positions = [position for length, context in zip(lengths, contexts, strict=True) for position in range(context - length, context)]
    rows = [row for row, length in enumerate(lengths) for _ in range(length)]
    return StepLayout(decodes, lengths, contexts, torch.tensor(positions), torch.tensor(rows), pages_RM, torch.tensor(contexts))


def cache_of(layout: StepLayout, page_size: int, size: int = LATENT + ROPE) -> Tensor:
    """NaN where no token may look."""
    kv_P11SD = torch.full((layout.pages_RM.numel(), 1, 1, page_size, size), float("nan"))
    for pages_M, context in zip(layout.pages_RM, layout.contexts, strict=True):
        for position in range(context):
            kv_P11SD[pages_M[position // page_size], :, :, position % page_size] = torch.randn(size)
    return kv_P11SD


def expected(q_THQ: Tensor, kv_P11SD: Tensor, layout: StepLayout, up: UpProjection) -> Tensor:
    """Token by token, head by head, as the definition has it."""
    page_size, outputs = kv_P11SD.shape[3], []
    for q_HQ, position, row in zip(q_THQ, layout.positions_T, layout.row_T, strict=True):
        at = torch.arange(int(position) + 1)
        kv_KD = kv_P11SD[layout.pages_RM[row, at // page_size], 0, 0, at % page_size]
        heads = []
        for q, weight_XL in zip(q_HQ, up.weight_HXL, strict=True):
            k, v = (kv_KD[:, :LATENT] @ weight_XL.T).split((NOPE, VALUE), dim=1)
            scores = torch.cat((k, kv_KD[:, LATENT:]), dim=1) @ q * 0.3
            heads.append(scores.softmax(0) @ v)
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def make(page_size: int, heads: int = 6) -> tuple[StepLayout, Tensor, Tensor, UpProjection]:
    layout = layout_of(3, LENGTHS, CONTEXTS, page_size)
    kv_P11SD = cache_of(layout, page_size)
    # Queries are a part of a wider product.
    q_THQ = torch.randn(sum(LENGTHS), heads * (NOPE + ROPE) + 7)[:, :-7].view(sum(LENGTHS), heads, NOPE + ROPE)
    return layout, kv_P11SD, q_THQ, UpProjection(torch.randn(heads, NOPE + VALUE, LATENT) / LATENT**0.5, NOPE)


@pytest.mark.parametrize("page_size", [5, 16])
def test_absorbed_and_expanded_give_what_the_definition_does(page_size: int) -> None:
    layout, kv, q, up = make(page_size)
    split, mixed = SplitMla(TorchLatentDecode(), TorchMlaPrefill()), torch_mla_mixed()
    wanted = expected(q, kv, layout, up)
    torch.testing.assert_close(split(q, kv, split.plan(layout, kv, 6, SPEC), up), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed(q, kv, mixed.plan(layout, kv, 6, SPEC), up), wanted, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.usefixtures("loop_bounds")
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "page_size", "dtype"), [(6, 64, torch.float32), (16, 16, torch.float16), (40, 48, torch.float32), (1, 13, torch.float32)]
)
def test_the_own_kernel(heads: int, page_size: int, dtype: torch.dtype, splits: int) -> None:
    pytest.importorskip("triton")
    from inference_service.kernels.triton_mla import mla_attend

    lengths, contexts = [1] * 6, [1, 64, 65, 130, 7, 129]
    layout = layout_of(6, lengths, contexts, page_size)
    # Padded tokens: twins of the third and of none.
    positions, rows = torch.cat((layout.positions_T, torch.tensor([-65, -1]))).int(), torch.cat((layout.row_T, torch.tensor([2, 0]))).int()
    layout = replace(layout, positions_T=positions, row_T=rows)
    kv, q_HTL, q_THR = cache_of(layout, page_size).to(dtype), torch.randn(heads, 8, LATENT).to(dtype), torch.randn(8, heads, ROPE).to(dtype)
    q_HTL[:, 6], q_THR[6] = q_HTL[:, 2], q_THR[2]
    q_THL, reference = q_HTL.transpose(0, 1), TorchLatentPaged()
    wanted, o = torch.empty(8, heads, LATENT), torch.full_like(q_THL, float("nan"))
    reference(q_THL.float(), q_THR.float(), kv.float(), reference.plan(layout, kv, heads, SPEC), wanted)
    mla_attend(q_THL, q_THR, kv, positions, rows, layout.pages_RM.int(), splits, o, 0.3)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(o.float(), wanted, atol=tolerance, rtol=tolerance)
    assert torch.equal(o[6], o[2]) and not o[7].any()


@interpreted
@pytest.mark.usefixtures("loop_bounds")
def test_the_own_kernel_serves_each_part_of_a_step() -> None:
    pytest.importorskip("triton")
    from inference_service.kernels.mla_paged import TritonLatentDecode, triton_mla_mixed, triton_mla_prefill

    layout, kv, q, up = make(16)
    own, mixed = SplitMla(TritonLatentDecode(), triton_mla_prefill()), triton_mla_mixed()
    wanted = expected(q, kv, layout, up)
    torch.testing.assert_close(own(q, kv, own.plan(layout, kv, 6, SPEC), up), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(mixed(q, kv, mixed.plan(layout, kv, 6, SPEC), up), wanted, atol=1e-5, rtol=1e-5)


class HostOps:
    """Does what FlashInfer's MLA wrappers are told to, by their documentation, row by row."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []
        self.twins: list[int | None] = []

    def make_mla_wrapper(self, workspace: Tensor, backend: str) -> int:
        self.plans.append(())
        return len(self.plans) - 1

    def make_mla_graph_wrapper(self, workspace: Tensor, backend: str, rows: int, pages: int, twin: int | None) -> int:
        self.twins.append(twin)
        return self.make_mla_wrapper(workspace, backend)

    def plan_mla(self, number: int, starts: Tensor, page_starts: Tensor, pages: Tensor, contexts: Tensor, *rest: Any) -> None:
        assert starts.tolist() == list(range(len(contexts) + 1)), "one token a row"
        self.plans[number] = page_starts.tolist(), pages.clone(), contexts.tolist(), rest[-1]

    def mla_paged(self, q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, number: int, o_THL: Tensor) -> None:
        starts, pages, contexts, scale = self.plans[number]
        for row, (q_HD, context) in enumerate(zip(torch.cat((q_THL, q_THR), -1), contexts, strict=True)):
            kv_KD = kv_P11SD[pages[starts[row] : starts[row + 1]], 0, 0].flatten(0, 1)[:context]
            o_THL[row] = (q_HD @ kv_KD.T * scale).softmax(-1) @ kv_KD[:, :LATENT]


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> HostOps:
    ops, events = HostOps(), SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(kernels, "flashinfer_ops", ops, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: events)
    return ops


def test_a_replay_is_planned_for_the_rows_that_there_are(on_the_host: HostOps) -> None:
    """Contexts grow into new pages, and the padded rows do what the row with the shortest context does."""
    decode, table = FlashInferLatent("fa3", prefills=False), layout_of(6, [1] * 6, [1] * 6, 16)
    pages_RM = table.pages_RM.contiguous()
    kv = torch.randn(pages_RM.numel(), 1, 1, 16, LATENT + ROPE)
    q_THL, q_THR, reference = torch.randn(6, 5, LATENT), torch.randn(6, 5, ROPE), TorchLatentDecode()
    planned = set()
    for contexts in ([16, 47, 100, 192, 15, 33], [17, 48, 101, 191], [9], [1, 2, 3, 4, 5, 6]):
        rows = len(contexts)
        step = StepLayout(rows, [1] * rows, contexts, table.positions_T, table.row_T, pages_RM, table.contexts_R)
        decode.plan_replay(step, kv, 5, SPEC)
        plan = decode.plan(replace(table, pages_RM=pages_RM, captured=True), kv, 5, SPEC)
        o_THL, wanted = torch.empty_like(q_THL), torch.empty_like(q_THL)
        decode(q_THL, q_THR, kv, plan, o_THL)
        padded = contexts + [min(contexts)] * (6 - rows)
        full = replace(table, contexts=padded, pages_RM=pages_RM, contexts_R=torch.tensor(padded))
        reference(q_THL, q_THR, kv, reference.plan(full, kv, 5, SPEC), wanted)
        torch.testing.assert_close(o_THL, wanted, atol=1e-5, rtol=1e-5)
        planned.add(plan)
    assert len(planned) == 1, "where the graph's kernel finds its plan"
    narrow = replace(step, pages_RM=pages_RM[:, :2].contiguous())
    decode.plan_replay(narrow, kv, 5, SPEC)
    assert decode.plan(replace(narrow, captured=True), kv, 5, SPEC) not in planned
    other = AttentionSpec(scale=0.2)
    decode.plan_replay(narrow, kv, 5, other)
    assert on_the_host.twins == [None, *planned, None], "plans of one spec lie in one place, and those of others elsewhere"
    # An eager step has a plan of its own, for the pages that it takes.
    eager = decode.plan(step, kv, 5, SPEC)
    o_THL = torch.empty_like(q_THL)
    decode(q_THL, q_THR, kv, eager, o_THL)
    torch.testing.assert_close(o_THL, wanted, atol=1e-5, rtol=1e-5)
    assert eager not in planned and on_the_host.plans[eager][0][-1] == 6


@interpreted
@pytest.mark.usefixtures("loop_bounds")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_few_rows_attend_by_the_own_kernel_and_are_not_planned(on_the_host: HostOps, rows: int, captured: bool) -> None:
    """A graph's rows count, also where a step has fewer."""
    pytest.importorskip("triton")
    decode, contexts = TritonOrFa3Latent(), [16, 47, 100, 15, 33][:rows]
    layout = layout_of(rows, [1] * rows, contexts, 16)
    layout = replace(layout, pages_RM=layout.pages_RM.contiguous())
    kv, q_THL, q_THR, reference = cache_of(layout, 16), torch.randn(rows, 5, LATENT), torch.randn(rows, 5, ROPE), TorchLatentDecode()
    o_THL, wanted = torch.full_like(q_THL, float("nan")), torch.empty_like(q_THL)
    if captured:
        decode.plan_replay(replace(layout, decodes=1, lengths=[1], contexts=contexts[:1]), kv, 5, SPEC)
        decode.plan_replay(layout, kv, 5, SPEC)
    decode(q_THL, q_THR, kv, decode.plan(replace(layout, captured=captured), kv, 5, SPEC), o_THL)
    reference(q_THL, q_THR, kv, reference.plan(layout, kv, 5, SPEC), wanted)
    torch.testing.assert_close(o_THL, wanted, atol=1e-5, rtol=1e-5)
    assert any(on_the_host.plans) == (rows > FEW_ROWS)
    # Beside chunks the decodes alone count.
    mixed = replace(layout, decodes=1, lengths=[1, *contexts[1:]])
    assert isinstance(decode.plan(mixed, kv, 5, SPEC), PagedPlan)
    assert SplitMla(decode, TorchMlaPrefill()).host_planned is not None


def appended(append: MlaAppend, layout: StepLayout, heads: int) -> tuple[Tensor, Tensor]:
    """The cache and the queries, of latents and queries that are parts of one product."""
    torch.manual_seed(0)
    tokens, q_size = len(layout.positions_T), heads * (NOPE + ROPE)
    product = torch.randn(tokens, q_size + LATENT + ROPE)
    q_THQ, kv_TD = product[:, :q_size].view(tokens, heads, NOPE + ROPE), product[:, q_size:]
    table_PR, norm_L = torch.randn(200, ROPE), torch.randn(LATENT)
    kv_P11SD = torch.full((layout.pages_RM.numel(), 1, 1, 16, LATENT + ROPE), float("nan"))
    append(q_THQ, kv_TD, norm_L, 1e-3, kv_P11SD, append.plan(layout, kv_P11SD, table_PR))
    return kv_P11SD, q_THQ


def test_append_norms_latents_and_rotates_the_rest() -> None:
    layout = layout_of(3, LENGTHS, CONTEXTS, 16)
    kv, q = appended(TorchMlaAppend(), layout, 3)
    torch.manual_seed(0)
    product, table, norm = torch.randn(len(q), 3 * (NOPE + ROPE) + LATENT + ROPE), torch.randn(200, ROPE), torch.randn(LATENT)

    def turned(x: Tensor, position: Tensor) -> Tensor:
        (cos, sin), (low, high) = table[position].chunk(2), x.chunk(2)
        return torch.cat((low * cos - high * sin, high * cos + low * sin))

    for token, (position, row) in enumerate(zip(layout.positions_T, layout.row_T, strict=True)):
        slot = kv[layout.pages_RM[row, position // 16], 0, 0, position % 16]
        torch.testing.assert_close(slot[:LATENT], F.rms_norm(product[token, -LATENT - ROPE : -ROPE], (LATENT,), norm, 1e-3))
        torch.testing.assert_close(slot[LATENT:], turned(product[token, -ROPE:], position))
        for head in range(3):
            given = product[token, head * (NOPE + ROPE) : (head + 1) * (NOPE + ROPE)]
            torch.testing.assert_close(q[token, head], torch.cat((given[:NOPE], turned(given[NOPE:], position))))
    assert kv.isnan().sum() == kv.numel() - len(q) * (LATENT + ROPE)


@interpreted
@pytest.mark.parametrize("heads", [3, 8, 17])
def test_own_append(heads: int) -> None:
    pytest.importorskip("triton")
    layout = layout_of(3, LENGTHS, CONTEXTS, 16)
    own, wanted = appended(TritonMlaAppend(), layout, heads), appended(TorchMlaAppend(), layout, heads)
    for ours, theirs in zip(own, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    # Padded tokens append nothing, and their queries turn as their twins' do.
    padded = replace(layout, positions_T=-1 - layout.positions_T)
    kv, q = appended(TritonMlaAppend(), padded, heads)
    assert kv.isnan().all()
    torch.testing.assert_close(q, wanted[1])


def test_any_backend_of_latents_serves_prefills() -> None:
    layout, kv, q, up = make(16)
    rows, outputs = AbsorbedRows(TorchLatentPaged()), torch.empty(len(q), 6, VALUE)
    rows(q, kv, rows.plan(layout, kv, 6, SPEC), up, outputs)
    torch.testing.assert_close(outputs, expected(q, kv, layout, up), atol=1e-5, rtol=1e-5)
