"""`baselines.kernels` on a CPU: whole runs, work by hand, resumed runs, and the adapters' views of pages."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from baselines.kernels import attention_adapters as adapters
from baselines.kernels.attention import AttentionDecode, AttentionMixed, AttentionPrefill, Step, attention_work, make_layout
from baselines.kernels.case import Bench, Case, Grid, Operator, Work
from baselines.kernels.elementwise import KvAppend, Norm, Rope
from baselines.kernels.fp8 import to_blocks, to_tensor
from baselines.kernels.gemm import Fp8Gemm, Gemm
from baselines.kernels.limits import limits_of
from baselines.kernels.machine import describe_machine, make_bench
from baselines.kernels.measure import OPERATORS, Family, Job, Message
from baselines.kernels.moe import Fp8Experts, Moe, touched
from baselines.kernels.record import Record, Result, read
from baselines.kernels.routing import Routing
from baselines.kernels.sampling import Sampling
from inference_service.kernels.support import Setting

TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 300,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
KERNELS = (sys.executable, "-m", "baselines.kernels")


def make_tiny(folder: Path) -> Bench:
    (folder / "config.json").write_text(json.dumps(TINY))
    return make_bench(None, [f"model.path={folder}", "cache.page_size=16", "device.kind=cpu"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def bench(tiny: Path) -> Bench:
    return make_tiny(tiny)


@pytest.fixture(scope="module")
def qwen(bench: Bench) -> Bench:
    """Qwen3-30B-A3B's shape in bfloat16."""
    published = make_bench(None, ["device.kind=cpu"])
    return replace(published, setting=replace(published.setting, dtype=torch.bfloat16))


def measure(bench: Bench, *operators: str, **job: Any) -> list[Result]:
    found: list[Message] = []
    with torch.inference_mode():
        Family(Job(list(operators), None, [], 60.0, **job), bench, found.append).run()
    return [message for message in found if isinstance(message, Result)]


@pytest.mark.parametrize("operator", [operator.name for operator in OPERATORS if operator not in (Fp8Gemm, Fp8Experts)])
def test_torch_is_right_and_timed_and_all_else_has_its_reason(bench: Bench, operator: str) -> None:
    results = measure(bench, operator)
    measured = {result.backend for result in results if result.status == "measured"}
    assert "torch" in measured and measured <= {"torch", "torch+torch", "onednn", "sort"}
    assert all(result.reason and result.us is None for result in results if result.status != "measured")
    assert {result.status for result in results} <= {"measured", "unsupported"}
    cases = [case.name for case in next(cls for cls in OPERATORS if cls.name == operator)(bench).cases()]
    assert [result.case for result in results if result.backend == "torch"] == cases
    for result in results:
        if result.status == "measured":
            assert result.us and result.us > 0 and result.timed == "host"
            assert result.share is None, "nothing is known of this CPU's limits"


def test_a_whole_run_prints_a_table_and_resumes(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "found" / "kernels.jsonl"
    command = [*KERNELS, "--set", f"model.path={tiny}", "--operators", "rope,norm", "--json", str(file), "--budget-s", "60"]
    first = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "**rope**" in first.stdout and "**norm**" in first.stdout
    assert "flashinfer: n/a, unsupported: rope by flashinfer does not run on" in first.stdout
    machine, results = read(file)
    assert machine and machine.device == "cpu" and len(results) > 8

    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b'"norm"' not in line or b"unsupported" in line]
    file.write_bytes(b"".join(kept) + lines[-1][:20])  # as if the run had been cut off while it wrote
    second = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    run = [line for line in second.stdout.splitlines() if " us, " in line]
    assert run and all(line.startswith("norm ") for line in run), "only what was lost is run again"
    again = {result.key: result for result in read(file)[1]}
    assert again.keys() == {result.key for result in results}
    assert all(again[result.key] == result for result in results if result.operator == "rope")


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--operators", "attention,moe"], "no operator attention"), (["--resume"], "needs --json")]
)
def test_bad_options_are_named(arguments: list[str], message: str) -> None:
    ran = subprocess.run([*KERNELS, *arguments], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2 and message in ran.stderr


def test_a_file_of_another_machine_is_not_resumed(bench: Bench, tmp_path: Path) -> None:
    here = describe_machine(bench)
    Record(tmp_path / "file", False, msgspec.structs.replace(here, device="another GPU"))
    with pytest.raises(ValueError, match="measured elsewhere"):
        Record(tmp_path / "file", True, here)


# What each operator must do, by hand.


def test_the_work_of_attention(qwen: Bench) -> None:
    """32 query and 4 KV heads of 128; a key or value of a token takes 4 x 128 x 2 bytes."""
    decode = AttentionDecode(qwen).work(Case("decode", {"batch": 8, "context": 1024}))
    assert decode == Work(4.0 * 32 * 128 * 8 * 1024, 8 * 1024 * 2 * 1024 + 8 * 2 * 32 * 128 * 2, "bfloat16")
    prefill = AttentionPrefill(qwen).work(Case("prefill", {"batch": 4, "tokens": 512}))
    assert prefill.flops == 4.0 * 32 * 128 * 4 * (512 * 513 // 2)
    mixed = AttentionMixed(qwen).work(Case("mixed", {"chunk": 512, "decodes": 32, "context": 2048}))
    assert mixed.flops == 4.0 * 32 * 128 * (32 * 2048 + sum(range(1537, 2049)))
    assert mixed.bytes == 33 * 2048 * 2048 + (32 + 512) * 2 * 32 * 128 * 2


def test_mixed_steps_are_run_over_chunk_decodes_and_context(qwen: Bench) -> None:
    operator = AttentionMixed(replace(qwen, grid=Grid()))
    cases = {case.name: operator.rows_of(case) for case in operator.cases()}
    assert len(cases) == 27
    assert cases["mixed: chunk 512, decodes 32, context 2048"] == ([2048] * 32, [(512, 2048)])
    assert cases["mixed: chunk 2048, decodes 8, context 512"] == ([512] * 8, [(2048, 2048)]), "a chunk is no longer than its context"


def test_a_shared_prefix_is_read_once(qwen: Bench) -> None:
    together = attention_work(qwen, [1024] * 10, [], shared_tokens=1000)
    assert together.bytes == (1000 + 10 * 24) * 2048 + 10 * 2 * 32 * 128 * 2
    assert together.flops == attention_work(qwen, [1024] * 10, []).flops


def test_the_work_of_experts_and_products(qwen: Bench) -> None:
    """128 experts of 3 x 768 x 2048, of which one token touches 8."""
    moe = Moe(qwen).work(Case("decode", {"tokens": 1}))
    assert moe.flops == 2 * 8 * 3 * 768 * 2048
    assert moe.bytes == pytest.approx(2 * (8 * 3 * 768 * 2048 + 2 * 2048))
    assert touched(128, 8, 32) == pytest.approx(111.8, abs=0.1) and touched(128, 8, 8192) == pytest.approx(128)
    fp8 = Fp8Experts(qwen).work(Case("decode", {"tokens": 1}))
    assert fp8.bytes == pytest.approx(8 * 3 * 768 * 2048 + 4 * 2048) and fp8.precision == "float8"
    gemm = Gemm(qwen).work(Case("qkv", {"tokens": 32}))
    assert gemm == Work(2.0 * 32 * 5120 * 2048, 2.0 * (5120 * 2048 + 32 * (5120 + 2048)), "bfloat16")
    fp8 = Fp8Gemm(qwen).work(Case("qkv", {"tokens": 32}))
    assert fp8 == Work(gemm.flops, 5120 * 2048 + 2.0 * 32 * (5120 + 2048), "float8")
    assert set(Gemm(qwen).weights()) == {"qkv", "o", "lm_head", "router"}
    assert {case.kind for case in Fp8Gemm(qwen).cases()} == {"qkv", "o"}


def test_the_work_of_what_computes_nothing_to_speak_of(qwen: Bench) -> None:
    decode = Case("decode", {"tokens": 32})
    assert Routing(qwen).work(decode).bytes == 32 * (128 * 2 + 8 * 8)
    assert Sampling(qwen).work(Case("plain", {"rows": 32})).bytes == 32 * 151936 * 2
    assert Norm(qwen).work(decode).bytes == 2 * (4 * 32 * 2048 + 2048)
    assert Rope(qwen).work(decode).bytes == 2 * 2 * 32 * 36 * 128
    assert KvAppend(qwen).work(decode).bytes == 2 * 2 * 32 * 40 * 128


def test_the_bound_is_memory_s_or_compute_s(qwen: Bench) -> None:
    limits = limits_of("NVIDIA H200")
    assert limits and limits_of("cpu") is None
    us, bound = limits.bound_us(Gemm(qwen).work(Case("lm_head", {"tokens": 1})))
    assert bound == "memory" and us == pytest.approx(151936 * 2048 * 2 / 4.3e6, rel=1e-3)
    us, bound = limits.bound_us(Gemm(qwen).work(Case("qkv", {"tokens": 8192})))
    assert bound == "compute" and us == pytest.approx(2 * 8192 * 5120 * 2048 / 989e6)


# What the adapters give FlashInfer.


def dense(kv_P2HSD: Tensor, pages: list[int], context: int) -> Tensor:
    """Keys and values of a row, [2, L, H, D]."""
    return torch.cat([kv_P2HSD[page].transpose(1, 2) for page in pages], dim=1)[:, :context]


def of_pages(kv_P2HSD: Tensor, pages: Any, row: int) -> Tensor:
    """The same as FlashInfer reads them from a wrapper's indices."""
    first, end = pages.page_starts[row : row + 2].tolist()
    context = (end - first - 1) * kv_P2HSD.shape[3] + int(pages.last[row])
    return dense(kv_P2HSD, pages.pages[first:end].tolist(), context)


def in_layout(step: Step, row: int) -> Tensor:
    size = step.kv_P2HSD.shape[3]
    pages = step.layout.pages_RM[row, : -(-step.layout.contexts[row] // size)].tolist()
    return dense(step.kv_P2HSD, pages, step.layout.contexts[row])


def make_step(bench: Bench, decodes: list[int], chunks: list[tuple[int, int]], shared_pages: int = 0) -> Step:
    layout, pages = make_layout(bench, decodes, chunks, shared_pages)
    q_THD = bench.normal(len(layout.positions_T), 4, 16)
    return Step(layout, q_THD, bench.normal(pages, 2, 2, 16, 16), torch.zeros_like(q_THD), shared_pages)


def test_wrappers_see_each_row_s_context(bench: Bench) -> None:
    step = make_step(bench, [1, 16, 17, 100], [(5, 33), (20, 20)])
    assert len(set(step.layout.pages_RM.flatten().tolist())) == len(step.kv_P2HSD), "every page belongs to a row"
    for rows in (slice(0, 4), slice(4, None), slice(None)):
        pages, (first, end, _) = adapters.Pages(step.layout, rows, 16), rows.indices(6)
        for index, row in enumerate(range(first, end)):
            assert torch.equal(of_pages(step.kv_P2HSD, pages, index), in_layout(step, row))
        assert pages.starts.tolist()[-1] == sum(step.layout.lengths[rows])


def test_a_cascade_s_levels_are_the_context(bench: Bench) -> None:
    step = make_step(bench, [100, 100, 100], [], shared_pages=4)
    seen: list[Any] = []
    cascade: Any = object.__new__(adapters.Cascade)
    cascade._calls = SimpleNamespace(plan_cascade=lambda levels, kv, heads: seen.extend(levels))
    cascade.plan(step.layout, step.kv_P2HSD, 4, 4)
    shared, own = seen
    assert (shared.starts.tolist(), own.starts.tolist()) == ([0, 3], [0, 1, 2, 3])
    for row in range(3):
        whole = torch.cat((of_pages(step.kv_P2HSD, shared, 0), of_pages(step.kv_P2HSD, own, row)), dim=1)
        assert torch.equal(whole, in_layout(step, row))


def test_pod_s_chunk_has_its_own_keys_and_values(bench: Bench) -> None:
    step = make_step(bench, [40, 7], [(20, 50)])
    pod: Any = object.__new__(adapters.Pod)
    pod._calls = SimpleNamespace(plan_pod=lambda pages, kv, heads: pages)
    decodes, k_LHD, v_LHD, pages = pod.plan(step.layout, step.kv_P2HSD, 4)
    assert decodes == 2 and torch.equal(torch.stack((k_LHD, v_LHD)), in_layout(step, 2))
    assert torch.equal(of_pages(step.kv_P2HSD, pages, 1), in_layout(step, 1))


def test_attention_without_pages_is_the_reference_s(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's, with PyTorch's own kernel in its place."""
    from torch.nn import attention

    step = make_step(bench, [], [(50, 50), (50, 50)])
    prefill = adapters.TorchCudnnPrefill()
    plan = prefill.plan(step.layout, step.kv_P2HSD, 4)
    monkeypatch.setattr(attention, "sdpa_kernel", lambda backend: torch.no_grad())
    o_THD = prefill(step.q_THD, step.kv_P2HSD, plan)
    torch.testing.assert_close(o_THD, AttentionPrefill(bench).reference(step), rtol=1e-4, atol=1e-5)


def test_fp8_restores_what_it_rounds() -> None:
    weight = torch.randn(3, 256, 384) * torch.logspace(-3, 3, 3).view(3, 1, 1)
    rounded, scales = to_blocks(weight)
    assert (rounded.shape, scales.shape, rounded.dtype) == (weight.shape, (3, 2, 3), torch.float8_e4m3fn)
    assert (rounded.float() * scales.repeat_interleave(128, -1).repeat_interleave(128, -2) - weight).norm() / weight.norm() < 0.05
    tensor, scale = to_tensor(weight[0])
    assert (tensor.float() * scale - weight[0]).norm() / weight[0].norm() < 0.05


def test_every_backend_of_an_h200_is_offered_or_refused_with_a_reason(qwen: Bench) -> None:
    """With FlashInfer and Triton at hand, but neither cuDNN's frontend nor vLLM."""
    versions = {"flashinfer": "0.6.13", "triton": "3.6.0", "cuda": "13.0", "nvcc": "13.0"}
    setting = Setting("sm_90", torch.bfloat16, 128, 8, 64, versions)
    able: dict[str, set[str]] = {}
    for cls in OPERATORS:
        operator: Operator = cls(qwen)
        refusals = {backend.name: backend.row.refusal(setting) for backend in operator.backends()}
        assert len(refusals) == len(operator.backends()), "no backend twice"
        able[operator.name] = {name for name, refusal in refusals.items() if not refusal}
    decode = {"triton", "xqa", "xqa-far", "fa2", "fa3", "fa2-cuda-cores", "batch-attention", "cascade", "torch"}
    prefill = {"fa2", "fa3", "fmha_v2", "triton", "torch", "torch-cudnn", "batch-attention"}
    mixed = {"triton", "torch", "xqa+fa3", "xqa+fmha_v2", "triton+fa3", "fa2+fa2", "torch+torch", "pod", "batch-pod", "batch-attention"}
    assert [able[f"attention_{part}"] for part in ("decode", "prefill", "mixed")] == [decode, prefill, mixed]
    assert able["moe"] == {"triton", "cutlass", "cutlass-default", "torch"} and able["moe_fp8"] == {"triton", "cutlass"}
    assert able["gemm"] == {"torch", "triton", "tinygemm"} and able["gemm_fp8"] == {"triton", "cublas", "deepgemm"}
    moe = qwen.shape.moe
    assert moe is not None
    uneven = replace(qwen, shape=replace(qwen.shape, moe=replace(moe, intermediate_size=1000)))
    for bench, cls, most in ((qwen, Gemm, 128), (qwen, Fp8Gemm, 256), (uneven, Moe, 256), (uneven, Fp8Experts, 256)):
        own = next(each for each in cls(bench).backends() if each.name == "triton")
        assert [bool(own.limit(Case("qkv", {"tokens": tokens}))) for tokens in (most, most + 1)] == [False, True]
    for cls in (Moe, Fp8Experts):
        assert not next(each for each in cls(qwen).backends() if each.name == "triton").limit(Case("prefill", {"tokens": 8192}))
    assert able["sampling"] == {"triton", "flashinfer", "flashinfer-own", "torch", "sort"}
    assert able["routing"] == {"triton", "torch"} and able["kv_append"] == {"triton", "torch", "flashinfer"}
