"""Which backend is chosen, what is said about it, and that each one computes what the reference computes."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from inference_service.config import ConfigError, Kernels
from inference_service.kernels import support
from inference_service.kernels.moe import TorchMoe
from inference_service.kernels.selection import OPERATORS, make_operators, select
from inference_service.messages import Kernel


def chosen(forced: Kernels, architecture: str, dtype: torch.dtype) -> dict[str, Kernel]:
    return {choice.row.operator: choice.message() for choice in select(forced, architecture, dtype)}


@pytest.mark.parametrize("architecture", sorted(support.ANY))
@pytest.mark.parametrize("dtype", sorted(support.FLOATS, key=str))
def test_every_operator_runs_everywhere(architecture: str, dtype: torch.dtype) -> None:
    kernels = chosen(Kernels(), architecture, dtype)
    assert set(kernels) == set(OPERATORS)
    assert all(kernel.reason for kernel in kernels.values())
    make_operators(select(Kernels(), architecture, dtype))


def test_every_refusal_has_a_reason() -> None:
    assert {row.operator for row in support.TABLE} == set(OPERATORS)
    for row in support.TABLE:
        for architecture in support.ANY:
            for dtype in support.FLOATS:
                refusal = row.refusal(architecture, dtype)
                supported = architecture in row.architectures and dtype in row.dtypes
                assert (refusal == "") == supported
                assert supported or "untried" not in refusal


def test_the_first_that_can_is_the_default() -> None:
    assert chosen(Kernels(), "x86_64", torch.float32)["gemm"].backend == "onednn"
    assert chosen(Kernels(), "x86_64", torch.bfloat16)["gemm"].backend == "torch"
    assert chosen(Kernels(), "sm_90", torch.float32)["gemm"].backend == "torch"
    assert chosen(Kernels(), "sm_90", torch.bfloat16)["gemm"].reason == "default on sm_90 in bfloat16"


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
    with pytest.raises(ConfigError, match=r"kernels\.gemm: no backend 'marlin'; there are: auto, onednn, torch"):
        select(Kernels(gemm="marlin"), "x86_64", torch.float32)


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"kernels\.attention: nothing runs here: .*riscv64"):
        select(Kernels(), "riscv64", torch.float32)


@pytest.mark.parametrize("row", support.rows("gemm"), ids=lambda row: row.backend)
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
    ids, weights = moe.route(logits, 2, renormalize)
    y = moe(x, *moe.pack(gate_up, down), ids, weights)
    for token in range(tokens):
        best = logits[token].softmax(-1).topk(2)
        scale = best.values / best.values.sum() if renormalize else best.values
        expected = torch.zeros(16)
        for weight, expert in zip(scale, best.indices, strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(y[token], expected, atol=1e-4, rtol=1e-4)
