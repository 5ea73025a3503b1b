"""Which backend is chosen, what is said about it, and that each one computes what the reference computes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inference_service.config import ConfigError, Kernels
from inference_service.kernels import support
from inference_service.kernels.attention import StepLayout
from inference_service.kernels.gemm import fits_cute_dsl
from inference_service.kernels.grouped_routing import GroupedSpec
from inference_service.kernels.kv_append import HeadNorms, TorchKvAppend
from inference_service.kernels.mla import LatentShape
from inference_service.kernels.moe import TorchMoe
from inference_service.kernels.routing import TorchRouting
from inference_service.kernels.selection import OPERATORS, keeps_from_graph, make_operators, operators_of, select
from inference_service.kernels.support import Setting
from inference_service.kernels.versions import at_least
from inference_service.messages import Kernel

LATENT, GROUPED = LatentShape(512, 128, 64, 128), GroupedSpec(256, 8, 8, 4, True, True, 2.5)
"""DeepSeek-V3's."""
ALL_THERE = {"flashinfer": "0.6.13", "triton": "3.6.0", "cuda": "13.0", "nvcc": "13.0"}


def setting(architecture: str, dtype: torch.dtype, **changes: Any) -> Setting:
    """Qwen3-30B-A3B's shape, with nothing installed where not said otherwise."""
    return replace(Setting(architecture, dtype, head_dim=128, group=8, page_size=64), **changes)


def chosen(forced: Kernels, architecture: str, dtype: torch.dtype, **changes: Any) -> dict[str, Kernel]:
    return {choice.row.operator: choice.message() for choice in select(forced, setting(architecture, dtype, **changes))}


def backends(architecture: str, dtype: torch.dtype, **changes: Any) -> dict[str, str]:
    kernels = chosen(Kernels(), architecture, dtype, **{"versions": ALL_THERE, **changes})
    return {operator: kernel.backend for operator, kernel in kernels.items()}


@pytest.mark.parametrize("architecture", sorted(support.ANY))
@pytest.mark.parametrize("dtype", sorted(support.FLOATS, key=str))
def test_every_operator_runs_everywhere(architecture: str, dtype: torch.dtype) -> None:
    for here in (setting(architecture, dtype), setting(architecture, dtype, latent=LATENT, grouped=GROUPED)):
        choices = select(Kernels(), here)
        assert tuple(choice.row.operator for choice in choices) == operators_of(here)
        assert all(choice.reason for choice in choices)
        make_operators(choices)
    assert "attention_decode" not in operators_of(here) and "attention_decode" in operators_of(setting(architecture, dtype))


def test_every_refusal_has_a_reason() -> None:
    assert {row.operator for row in support.TABLE} == set(OPERATORS)
    for row in support.TABLE:
        for architecture in support.ANY:
            for dtype in support.FLOATS:
                here = setting(architecture, dtype, versions=ALL_THERE | {"flashinfer": "0.7.4"})
                refusal = row.refusal(here)
                supported = architecture in row.architectures and dtype in row.dtypes and not row.limit(here)
                assert (refusal == "") == supported
                assert "untried" not in refusal
                assert not refusal or f"{row.operator} by {row.backend}" in refusal


def test_the_first_that_can_is_the_default() -> None:
    assert chosen(Kernels(), "x86_64", torch.float32)["gemm"].backend == "onednn"
    assert chosen(Kernels(), "x86_64", torch.bfloat16)["gemm"].backend == "torch"
    assert chosen(Kernels(), "sm_90", torch.float32)["gemm"].backend == "torch"
    assert chosen(Kernels(), "sm_90", torch.bfloat16)["gemm"].reason == "default on sm_90 in bfloat16"


@pytest.mark.parametrize(
    ("architecture", "decode", "prefill"),
    [
        ("sm_75", "torch", "torch"),
        ("sm_80", "triton", "fa2"),
        ("sm_89", "triton", "fa2"),
        ("sm_90", "triton", "fa3"),
        ("sm_100", "triton", "fa2"),
        ("sm_110", "triton", "fa2"),
        ("sm_121", "triton", "fa2"),
        ("x86_64", "torch", "torch"),
    ],
)
def test_attention_by_architecture(architecture: str, decode: str, prefill: str) -> None:
    chosen = backends(architecture, torch.bfloat16)
    assert (chosen["attention_decode"], chosen["attention_prefill"]) == (decode, prefill)
    assert backends(architecture, torch.float32)["attention_decode"] == "torch"
    assert backends("sm_75", torch.float16)["attention_decode"] == "fa2"


@pytest.mark.parametrize(
    ("features", "decode", "prefill", "moe"),
    [
        ({support.WINDOW}, "triton", "fa2", "triton"),
        ({support.WINDOW, support.SOFT_CAP}, "triton", "fa2", "triton"),
        ({support.WINDOW, support.SINKS, support.CLAMPED_EXPERTS}, "triton", "triton", "torch"),
    ],
)
def test_what_a_model_needs_decides_who_can(features: set[str], decode: str, prefill: str, moe: str) -> None:
    chosen = backends("sm_90", torch.bfloat16, features=frozenset(features))
    assert (chosen["attention_decode"], chosen["attention_prefill"], chosen["moe"]) == (decode, prefill, moe)
    # Gemma's heads are wider than the Triton kernel's.
    wide = backends("sm_90", torch.bfloat16, features=frozenset(features), head_dim=256)
    assert wide["attention_decode"] == wide["attention_prefill"] == ("torch" if support.SINKS in features else "fa2")


@pytest.mark.parametrize(
    ("architecture", "dtype", "features", "moe"),
    [
        ("sm_90", torch.bfloat16, set(), "triton"),
        ("sm_90", torch.float16, set(), "triton"),
        ("sm_90", torch.float32, set(), "torch"),
        ("sm_90", torch.bfloat16, {support.UNEVEN_EXPERTS}, "triton+cutlass"),
        ("sm_90", torch.bfloat16, {support.UNEVEN_HIDDEN}, "triton+cutlass"),
        ("sm_100", torch.bfloat16, set(), "triton+cutlass"),
        ("sm_89", torch.bfloat16, set(), "triton+cutlass"),
        ("sm_80", torch.bfloat16, set(), "torch"),
    ],
)
def test_the_own_experts_are_preferred_where_they_were_measured(
    architecture: str, dtype: torch.dtype, features: set[str], moe: str
) -> None:
    assert backends(architecture, dtype, features=frozenset(features))["moe"] == moe
    forced = chosen(Kernels(moe="cutlass"), architecture, dtype, features=frozenset(features), versions=ALL_THERE)["moe"].backend
    assert forced == ("cutlass" if moe in ("triton", "triton+cutlass") else moe)


@pytest.mark.parametrize(
    ("changes", "operator", "backend", "words"),
    [
        ({"page_size": 48}, "attention_decode", "xqa", "pages of 16, 32, 64 or 128 tokens, not 48"),
        ({"group": 64}, "attention_decode", "xqa", "32 query heads"),
        ({"head_dim": 96}, "attention_prefill", "fa3", "not 96"),
        ({"page_size": 48}, "attention_prefill", "fmha_v2", "not 48"),
        ({"head_dim": 96}, "kv_append", "triton", "power of two"),
        ({"features": frozenset({support.SOFT_CAP, support.WINDOW})}, "attention_prefill", "fa3", "soft caps, no sliding windows"),
        ({"features": frozenset({support.SINKS})}, "attention_decode", "fa2", "has no attention sinks"),
        ({"versions": ALL_THERE | {"flashinfer": "0.6.9"}}, "norm", "flashinfer", "flashinfer 0.6.13 or newer, not 0.6.9"),
        ({"versions": {"flashinfer": "0.6.13"}}, "kv_append", "triton", "triton 3.6 or newer, which is not there"),
        ({"versions": {"flashinfer": "0.6.13", "cuda": "13.0"}}, "attention_prefill", "fa3", "triton 3.6 or newer, which is not there"),
        ({"architecture": "sm_121", "versions": ALL_THERE | {"cuda": "12.8"}}, "norm", "flashinfer", "cuda 12.9 or newer, not 12.8"),
    ],
)
def test_a_shape_or_a_version_that_a_backend_cannot_take_is_refused(
    changes: dict[str, Any], operator: str, backend: str, words: str
) -> None:
    row = next(row for row in support.rows(operator) if row.backend == backend)
    assert row.refusal(setting("sm_90", torch.bfloat16, versions=ALL_THERE)) == ""
    assert words in row.refusal(replace(setting("sm_90", torch.bfloat16, versions=ALL_THERE), **changes))


@pytest.mark.parametrize(
    ("architecture", "prefill", "decode", "mixed"),
    [("sm_75", "torch", "torch", "torch"), ("sm_80", "fa2", "triton", "triton"), ("sm_90", "fa3", "triton+fa3", "triton")],
)
def test_latents_by_architecture(architecture: str, prefill: str, decode: str, mixed: str) -> None:
    chosen = backends(architecture, torch.bfloat16, latent=LATENT, grouped=GROUPED)
    assert (chosen["mla_prefill"], chosen["mla_decode"], chosen["mla_mixed"]) == (prefill, decode, mixed)
    assert backends(architecture, torch.float32, latent=LATENT)["mla_decode"] == "torch"
    assert backends("sm_90", torch.bfloat16, latent=replace(LATENT, value=64))["mla_prefill"] == "torch"
    # What FA3 does not take, the own kernel does.
    assert backends("sm_90", torch.bfloat16, latent=replace(LATENT, latent=256))["mla_decode"] == "triton"
    assert backends("sm_90", torch.bfloat16, latent=LATENT, versions={"triton": "3.6"})["mla_decode"] == "triton"


@pytest.mark.parametrize(
    ("changes", "operator", "backend", "words"),
    [
        ({"latent": replace(LATENT, latent=320)}, "mla_decode", "triton", "kv_lora_rank"),
        ({"latent": replace(LATENT, latent=256)}, "mla_decode", "fa3", "kv_lora_rank of 512"),
        ({"latent": replace(LATENT, rope=32)}, "mla_decode", "triton+fa3", "qk_rope_head_dim of 64"),
        ({"latent": replace(LATENT, value=64)}, "mla_prefill", "fa2", "heads of 192 with values of 128, not 192 with 64"),
        ({"latent": replace(LATENT, rope=32)}, "mla_decode", "fa2", "qk_rope_head_dim of 64"),
        ({"grouped": replace(GROUPED, groups=1, top_groups=1)}, "grouped_routing", "flashinfer", "1 x 1 here, not 8"),
        ({"grouped": replace(GROUPED, sigmoid=False)}, "grouped_routing", "flashinfer", "sigmoid"),
        ({"grouped": replace(GROUPED, renormalize=False)}, "grouped_routing", "flashinfer", "sum to 1"),
        ({"grouped": replace(GROUPED, experts=512)}, "grouped_routing", "flashinfer", "32 experts a group"),
    ],
)
def test_limits_of_what_deepseek_needs(changes: dict[str, Any], operator: str, backend: str, words: str) -> None:
    row = next(row for row in support.rows(operator) if row.backend == backend)
    assert row.refusal(setting("sm_90", torch.bfloat16, versions=ALL_THERE, latent=LATENT, grouped=GROUPED)) == ""
    here = {"latent": LATENT, "grouped": GROUPED} | changes
    assert words in row.refusal(setting("sm_90", torch.bfloat16, versions=ALL_THERE, **here))


@pytest.mark.parametrize("backend", ["fa2", "fa3", "triton+fa3"])
def test_latents_in_graphs_are_planned_as_an_older_flashinfer_does_it(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    newer = ALL_THERE | {"flashinfer": "0.7.4"}
    kernel = chosen(Kernels(mla_decode=backend), "sm_90", torch.bfloat16, latent=LATENT, versions=newer)["mla_decode"]
    assert kernel.backend == "triton"
    assert f"mla_decode by {backend} is planned for CUDA graphs as FlashInfer before 0.7 does it, not 0.7.4" in kernel.reason
    older = chosen(Kernels(mla_decode=backend), "sm_90", torch.bfloat16, latent=LATENT, versions=ALL_THERE | {"flashinfer": "0.6.20"})
    assert older["mla_decode"].backend == backend
    # Prompts are planned outside of graphs, with the pages of their contexts.
    assert backends("sm_90", torch.bfloat16, latent=LATENT, versions=newer)["mla_prefill"] == "fa3"


def test_versions_are_compared_as_numbers() -> None:
    assert at_least("0.10.0", "0.6.13")
    assert at_least("3.6.0+git1", "3.6")
    assert not at_least("12.8", "12.10")


def test_the_measured_backend_comes_before_the_default_and_after_the_forced() -> None:
    here = setting("sm_90", torch.bfloat16, versions=ALL_THERE)
    measured = {"attention_prefill": "fmha_v2", "attention_decode": "trtllm-gen", "norm": "no longer known"}
    automatic = {choice.row.operator: choice for choice in select(Kernels(), here, measured)}
    assert automatic["attention_prefill"].message() == Kernel("attention_prefill", "fmha_v2", "measured fastest here")
    assert automatic["attention_decode"].row.backend == "triton"
    assert automatic["norm"].row.backend == "flashinfer"
    forced = {choice.row.operator: choice.row.backend for choice in select(Kernels(attention_prefill="fa2"), here, measured)}
    assert forced["attention_prefill"] == "fa2"


def test_what_keeps_a_step_from_a_graph_is_known() -> None:
    here = setting("sm_90", torch.bfloat16, versions=ALL_THERE)
    captured = {choice.row.operator for choice in keeps_from_graph(select(Kernels(), here))}
    assert not captured & {"attention_decode", "attention_prefill", "kv_append", "norm", "gemm"}
    planned = {choice.row.operator for choice in keeps_from_graph(select(Kernels(attention_decode="fa2"), here))}
    assert "attention_decode" in planned
    latent = replace(here, latent=LATENT, grouped=GROUPED)
    assert all(not keeps_from_graph(select(Kernels(mla_decode=backend), latent)) for backend in ("auto", "triton", "fa2", "fa3"))
    assert keeps_from_graph(select(Kernels(mla_decode="torch"), latent))


def test_a_forced_backend_is_used(caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(Kernels(gemm="torch"), "x86_64", torch.float32)["gemm"] == Kernel("gemm", "torch", "forced by kernels.gemm")
    assert not caplog.records


def test_a_forced_backend_that_cannot_run_is_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kernel = chosen(Kernels(gemm="onednn"), "x86_64", torch.bfloat16)["gemm"]
    assert kernel.backend == "torch"
    assert "onednn does not run in bfloat16" in kernel.reason
    (record,) = caplog.records
    assert all(word in record.getMessage() for word in ("kernels.gemm", "onednn", "torch", "bfloat16", "AVX-512"))


def test_an_unknown_backend_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.gemm: no backend 'marlin'; there are: auto, onednn, .*torch"):
        select(Kernels(gemm="marlin"), setting("x86_64", torch.float32))


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.attention_decode: nothing runs here: .*riscv64"):
        select(Kernels(), setting("riscv64", torch.float32))


def test_the_low_m_kernels_of_blackwell() -> None:
    row = next(row for row in support.rows("gemm") if row.backend == "cute-dsl")
    newer = ALL_THERE | {"flashinfer": "0.7.4"}
    assert row.refusal(setting("sm_100", torch.bfloat16, versions=newer)) == ""
    assert "0.7.4 or newer, not 0.6.13" in row.refusal(setting("sm_100", torch.bfloat16, versions=ALL_THERE))
    assert "sm_100 and sm_103" in row.refusal(setting("sm_90", torch.bfloat16, versions=newer))
    assert "bfloat16" in row.refusal(setting("sm_100", torch.float16, versions=newer))


def test_what_the_low_m_kernels_take() -> None:
    x, weight = torch.zeros(33, 256, dtype=torch.bfloat16), torch.zeros(48, 256, dtype=torch.bfloat16)
    storage = torch.zeros(48 * 256 + 8, dtype=torch.bfloat16)
    assert fits_cute_dsl(x[:1], weight) and fits_cute_dsl(x[:32], weight)
    assert not fits_cute_dsl(x, weight) and not fits_cute_dsl(x[:0], weight)
    assert not fits_cute_dsl(x[:4, :192].contiguous(), weight[:, :192].contiguous())
    assert not fits_cute_dsl(x[:4, :128], weight[:, :128].contiguous()) and not fits_cute_dsl(x[:4, :128].contiguous(), weight[:, :128])
    assert not fits_cute_dsl(x[:4], storage[8:].view(48, 256)), "16 bytes off"


@pytest.mark.parametrize("row", [row for row in support.rows("gemm") if "x86_64" in row.architectures], ids=lambda row: row.backend)
@pytest.mark.parametrize("tokens", [1, 2, 17, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_gemm_backends_compute_a_linear(row: support.Row, tokens: int, bias: bool) -> None:
    if row.architectures != support.ANY and not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        pytest.skip("this build of PyTorch has no oneDNN")
    generator = torch.Generator().manual_seed(0)
    x, weight, offset = (torch.randn(shape, generator=generator) for shape in ((tokens, 96), (80, 96), (80,)))
    gemm = row.make()
    y = gemm(x, gemm.pack(weight.clone()), offset if bias else None)
    torch.testing.assert_close(y, F.linear(x, weight, offset if bias else None), atol=1e-4, rtol=1e-5)
    halves = y.chunk(2, dim=-1)
    torch.testing.assert_close(gemm.silu_and_mul(y), F.silu(halves[0]) * halves[1])


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("renormalize", [False, True])
def test_experts_are_the_sum_over_each_tokens_choices(tokens: int, renormalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, logits, gate_up, down = (torch.randn(s, generator=generator) for s in ((tokens, 16), (tokens, 9), (9, 48, 16), (9, 16, 24)))
    logits[:, 4] = -9.0  # An expert that no one chooses.
    moe = TorchMoe()
    ids, weights = TorchRouting()(logits, 2, renormalize)
    y = moe(x, *moe.pack(gate_up, down), ids, weights)
    for token in range(tokens):
        best = logits[token].softmax(-1).topk(2)
        scale = best.values / best.values.sum() if renormalize else best.values
        expected = torch.zeros(16)
        for weight, expert in zip(scale, best.indices, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(y[token], expected, atol=1e-4, rtol=1e-4)


def test_kv_append_norms_and_rotates_what_attention_reads_and_leaves_values_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, size, page_size = 6, 2, 8, 4
    qkv, table = torch.randn(5, heads + 2 * kv_heads, size, generator=generator), torch.randn(12, size, generator=generator)
    norms = HeadNorms(torch.randn(size, generator=generator), torch.randn(size, generator=generator), 1e-6)
    positions, rows, pages = torch.tensor([9, 0, 1, 2, 3]), torch.tensor([0, 1, 1, 1, 1]), torch.tensor([[4, 1, 3], [2, 0, 0]])
    layout = StepLayout(1, [1, 4], [10, 4], positions, rows, pages, torch.tensor([10, 4]))
    kv = torch.full((5, 2, kv_heads, page_size, size), float("nan"))
    append, given = TorchKvAppend(), qkv.clone()
    q = append(given, norms, kv, append.plan(layout, kv, table))
    for token, (position, row) in enumerate(zip(positions, rows, strict=True)):
        cos, sin = table[position].chunk(2)
        for head in range(heads + kv_heads):
            x = F.rms_norm(qkv[token, head], (size,), norms.q_D if head < heads else norms.k_D, norms.eps)
            low, high = x.chunk(2)
            expected = torch.cat((low * cos - high * sin, high * cos + low * sin))
            slot = pages[row, position // page_size], 0, head - heads, position % page_size
            torch.testing.assert_close(q[token, head] if head < heads else kv[slot], expected)
        torch.testing.assert_close(kv[pages[row, position // page_size], 1, :, position % page_size], qkv[token, heads + kv_heads :])
    assert kv.isnan().sum() == kv.numel() - 5 * 2 * kv_heads * size
