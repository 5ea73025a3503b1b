"""How a step with decodes and prefill chunks finds its attention's form in the measured table, and what is said and kept of that table."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from inference_service.config import Kernels
from inference_service.execution.attention_timing import Form, Timed, compare_forms
from inference_service.execution.tuning import Tuning, load_tuning, save_tuning
from inference_service.kernels import support
from inference_service.kernels.attention import AttentionSpec, FusedAttention, SplitAttention, StepLayout
from inference_service.kernels.attention_forms import FORMS, FormTable, FormTimes, FusedByTable, drop_missing
from inference_service.kernels.attention_mixed import TorchPagedAttention
from inference_service.kernels.attention_torch import TorchDecode, TorchPrefill
from inference_service.kernels.flashinfer_pod import Pod
from inference_service.kernels.selection import Choice, captures_mixed, fused_forms, make_operators, select
from inference_service.kernels.support import Setting

SPLIT = "triton+fa3"
TIMES = [
    FormTimes((512, 32, 2048), {SPLIT: 75.0, "batch_pod": 88.0, "pod": 80.0}),
    FormTimes((512, 128, 2048), {SPLIT: 178.0, "batch_pod": 152.0, "pod": 150.0}),
    FormTimes((2048, 32, 2048), {SPLIT: 132.0, "batch_pod": 191.0, "pod": 120.0}),
    FormTimes((2048, 128, 2048), {SPLIT: 238.0, "batch_pod": 235.0, "pod": 240.0}),
]
HERE = Setting("sm_90", torch.bfloat16, 128, 8, 64, {"flashinfer": "0.6.13", "triton": "3.6.0", "cuda": "13.0"})


@pytest.mark.parametrize(
    ("size", "forms"),
    [
        ((512, 128, 2048), ["pod", "batch_pod"]),
        ((700, 90, 1000), ["pod", "batch_pod"]),
        ((512, 63, 2048), []),
        ((512, 65, 2048), ["pod", "batch_pod"]),
        ((1, 1, 1), []),
        ((1100, 10, 30_000), ["pod"]),
        ((100_000, 1000, 100_000), []),  # Within the margin.
    ],
)
def test_the_nearest_size_by_ratios_decides(size: tuple[int, int, int], forms: list[str]) -> None:
    assert FormTable(TIMES, SPLIT, FORMS).find(*size) == forms


def test_what_cannot_run_or_was_not_measured_is_passed_over() -> None:
    table = FormTable(TIMES, SPLIT, ["batch_pod"])
    assert table.forms == ["batch_pod"] and table.find(512, 128, 2048) == ["batch_pod"] and table.find(2048, 32, 2048) == []
    assert table.describe() == "eager steps by the measured table: batch_pod at 1 of 4 sizes, else triton+fa3"
    both = FormTable(TIMES, SPLIT, FORMS)
    assert both.describe() == "eager steps by the measured table: pod at 2 of 4 sizes, else triton+fa3"
    assert FormTable(TIMES, SPLIT, []).forms == []
    assert FormTable(TIMES, SPLIT, []).describe() == "eager steps by triton+fa3, measured fastest at all 4 sizes"
    other = FormTable(TIMES, "xqa+fa2", FORMS)
    assert other.forms == [] and other.describe() == "eager steps by xqa+fa2, beside which nothing was measured here"


# Which choice is made, and what is said of it.


def mixed_choice(forced: Kernels, times: list[FormTimes], setting: Setting = HERE) -> Choice:
    return next(choice for choice in select(forced, setting, {}, times) if choice.row.operator == "attention_mixed")


def test_the_choice_says_that_it_is_by_the_measured_table() -> None:
    choice = mixed_choice(Kernels(), TIMES)
    assert choice.message().backend == "triton" and captures_mixed([choice]), "short steps stay in their graphs"
    assert choice.reason == "default on sm_90 in bfloat16; eager steps by the measured table: pod at 2 of 4 sizes, else triton+fa3"
    assert choice.table and choice.table.forms == ["batch_pod", "pod"]
    # Another split form than was measured, nothing measured, and a backend that is forced.
    assert "by triton+fa2, beside which nothing was measured" in mixed_choice(Kernels(attention_prefill="fa2"), TIMES).reason
    assert mixed_choice(Kernels(), []).message().reason == "default on sm_90 in bfloat16"
    for forced in ("triton", "batch_pod"):
        choice = mixed_choice(Kernels(attention_mixed=forced), TIMES)
        assert choice.table is None and choice.reason == "forced by kernels.attention_mixed"


def test_batch_attention_is_never_measured_nor_what_cannot_run() -> None:
    assert fused_forms(HERE) == ["batch_pod", "pod"]
    assert fused_forms(replace(HERE, features=frozenset({support.FP8_CACHE}))) == fused_forms(replace(HERE, dtype=torch.float32)) == []


def test_without_a_form_that_wins_none_is_made() -> None:
    slower = [FormTimes((512, 32, 2048), {"torch+torch": 75.0, "batch_pod": 88.0})]
    choices = select(Kernels(), replace(HERE, versions={}), {}, slower)
    assert make_operators(choices).attention.fused is None


def test_a_form_that_is_not_compiled_any_more_is_not_chosen() -> None:
    times, missing = drop_missing(TIMES, lambda form: form != "pod")
    assert missing == ["pod"]
    assert [each.microseconds.keys() for each in times] == [{SPLIT, "batch_pod"}] * 4
    choice = mixed_choice(Kernels(), times)
    assert choice.reason.endswith("eager steps by the measured table: batch_pod at 1 of 4 sizes, else triton+fa3")
    assert choice.table and choice.table.forms == ["batch_pod"]
    assert drop_missing(TIMES, lambda form: True) == (TIMES, [])


def test_what_is_slower_everywhere_may_be_missing() -> None:
    """It is not even asked for, since that would import FlashInfer."""
    slower = [FormTimes((512, 32, 2048), {SPLIT: 75.0, "batch_pod": 88.0, "pod": 80.0})]
    assert drop_missing(slower, lambda form: pytest.fail(form)) == (slower, [])


# What is measured.


class Wrong(TorchPagedAttention):
    """Leaves out the last head."""

    def __call__(self, q_THD: Tensor, *args: Any) -> Tensor:
        return super().__call__(q_THD, *args) * (torch.arange(q_THD.shape[1])[:, None] < q_THD.shape[1] - 1)


class Failing(TorchPagedAttention):
    def __call__(self, q_THD: Tensor, *args: Any) -> Tensor:
        raise RuntimeError("Ninja build failed\nmuch more")


def test_a_fused_form_that_fails_or_is_wrong_is_left_out_for_good() -> None:
    split: dict[str, Form] = {SPLIT: SplitAttention(TorchDecode(), TorchPrefill())}
    forms = split | {"right": Together(9), "wrong": Together(9, Wrong()), "failing": Together(9, Failing()), "one chunk": Together(1)}
    layout = make_layout([30, 17], [(8, 40), (8, 8)])
    kv, q = torch.randn(int(layout.pages_RM.max()) + 1, 2, 2, 16, 8), torch.randn(len(layout.positions_T), 4, 8)

    def time_form(form: Form) -> tuple[Timed, Tensor]:
        return (1.0, 2.0), form(q, kv, form.plan(layout, kv, 4))

    said: list[str] = []
    assert compare_forms(forms, layout, time_form, said.append) == {SPLIT: (1.0, 2.0), "right": (1.0, 2.0)}
    assert list(forms) == [SPLIT, "right", "one chunk"], "what does not serve this step may serve others"
    wrong, failing = said
    assert "by wrong: left out: it is wrong here" in wrong and failing.endswith("by failing: left out: RuntimeError: Ninja build failed")


# What is kept.


def test_times_are_kept_for_this_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_SERVICE_CACHE", str(tmp_path))
    here = {"gpu": "NVIDIA H200", "attention": "32 heads, 4 KV heads of 128"}
    path = save_tuning(Tuning(here, {}, {}, {}, TIMES))
    kept = load_tuning(here)
    assert kept and kept.mixed == TIMES
    assert load_tuning(here | {"gpu": "NVIDIA B200"}) is None and load_tuning(here | {"attention": "another"}) is None
    older = {name: value for name, value in msgspec.json.decode(path.read_bytes()).items() if name != "mixed"}
    path.write_bytes(msgspec.json.encode(older))
    kept = load_tuning(here)
    assert kept and kept.mixed is None, "a file of before: not measured"
    save_tuning(Tuning(here, {}, {}, {}, []))
    kept = load_tuning(here)
    assert kept and kept.mixed == [], "measured: split is the only form"


# What a step does.


class Together(FusedAttention):
    """A fused form that runs on a CPU."""

    def __init__(self, chunks: int, attention: TorchPagedAttention | None = None) -> None:
        self._attention, self._chunks = attention or TorchPagedAttention(), chunks

    def serves(self, layout: StepLayout) -> bool:
        return super().serves(layout) and len(layout.lengths) - layout.decodes <= self._chunks

    def _plan(self, layout: StepLayout, kv_P2HSD: Tensor, heads: int, spec: AttentionSpec) -> Any:
        return self._attention.plan(layout, kv_P2HSD, heads, spec)

    def __call__(self, q_THD: Tensor, kv_P2HSD: Tensor, plan: Any, sinks_H: Tensor | None = None) -> Tensor:
        return self._attention(q_THD, kv_P2HSD, plan, sinks_H)


def make_layout(decodes: list[int], chunks: list[tuple[int, int]]) -> StepLayout:
    """Pages of 16."""
    lengths, contexts = [1] * len(decodes) + [length for length, _ in chunks], [*decodes, *(context for _, context in chunks)]
    counts = [-(-context // 16) for context in contexts]
    starts = [0, *accumulate(counts)]
    return StepLayout(
        len(decodes),
        lengths,
        contexts,
        torch.tensor([at for length, context in zip(lengths, contexts, strict=True) for at in range(context - length, context)]),
        torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)]),
        torch.tensor([[start + min(page, count - 1) for page in range(max(counts))] for start, count in zip(starts, counts, strict=False)]),
        torch.tensor(contexts),
    )


def test_each_step_takes_its_form_and_all_forms_agree() -> None:
    table = FormTable(
        [
            FormTimes((16, 2, 32), {SPLIT: 9.0, "batch_pod": 8.0, "pod": 7.0}),
            FormTimes((16, 16, 32), {SPLIT: 9.0, "batch_pod": 8.0, "pod": 10.0}),
            FormTimes((64, 2, 32), {SPLIT: 9.0, "batch_pod": 10.0, "pod": 8.0}),
            FormTimes((64, 16, 32), {SPLIT: 9.0, "batch_pod": 10.0, "pod": 10.0}),
        ],
        SPLIT,
        FORMS,
    )
    forms = {"batch_pod": Together(chunks=9), "pod": Together(chunks=1)}
    fused = FusedByTable(table, forms)
    attention, split = SplitAttention(TorchDecode(), TorchPrefill(), fused), SplitAttention(TorchDecode(), TorchPrefill())
    steps: list[tuple[list[int], list[tuple[int, int]], str]] = [
        ([30, 17], [(16, 40)], "pod"),
        ([30, 17], [(8, 40), (8, 8)], "batch_pod"),
        ([33] * 16, [(16, 16)], "batch_pod"),
        ([30, 17], [(60, 70)], "pod"),
        ([30, 17], [(30, 70), (30, 30)], ""),
        ([33] * 16, [(64, 64)], ""),
        ([33] * 16, [], ""),
        ([], [(16, 16)], ""),
    ]
    for decodes, chunks, form in steps:
        before = {name: each.steps for name, each in forms.items()}
        layout = make_layout(decodes, chunks)
        kv = torch.randn(int(layout.pages_RM.max()) + 1, 2, 2, 16, 8)
        q = torch.randn(len(layout.positions_T), 4, 8)
        ours, expected = (each(q, kv, each.plan(layout, kv, 4)) for each in (attention, split))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)
        assert [name for name, each in forms.items() if each.steps > before[name]] == ([form] if form else [])
    assert sum(form.steps for form in fused.forms()) == 4


def test_a_late_chunks_own_context_counts() -> None:
    """It is read as decodes' contexts are; a first chunk reads only itself."""
    table = FormTable(
        [FormTimes((16, 2, context), {SPLIT: 9.0, form: 8.0}) for context, form in ((32, "pod"), (512, "batch_pod"))], SPLIT, FORMS
    )
    forms = {"batch_pod": Together(chunks=9), "pod": Together(chunks=9)}
    fused = FusedByTable(table, forms)
    for chunks, form in (([(16, 16)], "pod"), ([(8, 8), (8, 40)], "pod"), ([(8, 600), (8, 8)], "batch_pod"), ([(200, 200)], "pod")):
        assert fused.choose(make_layout([30, 17], chunks)) is forms[form]
    assert fused.choose(make_layout([900, 800], [(16, 16)])) is forms["batch_pod"]


def test_pod_is_for_one_first_chunk() -> None:
    pod = Pod.__new__(Pod)  # Without FlashInfer.
    for decodes, chunks, serves in (
        ([30], [(16, 16)], True),
        ([30], [(16, 40)], False),
        ([30], [(16, 16), (8, 8)], False),
        ([], [(16, 16)], False),
        ([30], [], False),
    ):
        assert pod.serves(make_layout(decodes, chunks)) == serves
