"""Norms, activation, and QK norm with rotation and append, against their float32 references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels import support
from inference_service.kernels.attention import StepLayout
from inference_service.kernels.kv_append import HeadNorms, TorchKvAppend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
HALVES = [torch.bfloat16, torch.float16]


def backend(operator: str, name: str) -> Any:
    return next(row for row in support.rows(operator) if row.backend == name).make()


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert ours.isfinite().all()
    assert ((ours.float() - expected).norm() / expected.norm()).item() < TOLERANCES[ours.dtype]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 2048), (3, 576), (64, 2048), (257, 4096), (4096, 2048)])
def test_norm(tokens: int, size: int, dtype: torch.dtype) -> None:
    norm, x, residual = backend("norm", "flashinfer"), random(tokens, size, dtype=dtype), random(tokens, size, dtype=dtype)
    weight = (1 + 0.1 * torch.randn(size, device="cuda")).to(dtype)
    assert_near(norm.rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (size,), weight.float(), 1e-6))
    total = x.float() + residual.float()
    normed = norm.add_rms_norm(x, residual, weight, 1e-6)
    assert_near(normed, F.rms_norm(total, (size,), weight.float(), 1e-6))
    assert_near(residual, total)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 768), (5, 1536), (300, 6144)])
def test_silu_and_mul(tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = random(tokens, 2 * size, dtype=dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert_near(backend("gemm", "cublas").silu_and_mul(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("tokens", [1, 7, 256, 3000])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(32, 4, 128, 64), (9, 3, 64, 16), (16, 16, 128, 64), (16, 2, 128, 5)]
)
def test_kv_append(heads: int, kv_heads: int, head_dim: int, page_size: int, tokens: int, dtype: torch.dtype, normed: bool) -> None:
    if dtype != torch.bfloat16 and heads != 32:
        pytest.skip("each dtype and shape is compiled for itself; one shape does for the other dtypes")
    rows, width = 8, -(-4096 // page_size)
    pages = torch.randperm(rows * width, device="cuda").view(rows, width)
    # Each token at a place of its own.
    place = torch.randperm(rows * width * page_size, device="cuda")[:tokens]
    row, position = place // (width * page_size), place % (width * page_size)
    layout = StepLayout(0, [], [], position, row, pages, position)
    table, qkv = torch.rand(width * page_size, head_dim, device="cuda") * 2 - 1, random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norms = HeadNorms(1 + random(head_dim, dtype=dtype), 1 + random(head_dim, dtype=dtype), 1e-6) if normed else None
    norms32 = HeadNorms(norms.q_D.float(), norms.k_D.float(), norms.eps) if norms else None
    kv = torch.full((rows * width, 2, kv_heads, page_size, head_dim), float("nan"), device="cuda", dtype=dtype)
    kv32, plain, fused = kv.float().clone(), TorchKvAppend(), backend("kv_append", "triton")

    expected = plain(qkv.float().clone(), norms32, kv32, plain.plan(layout, kv32, table))
    written = ~kv32.isnan()
    packed = StepLayout(0, [], [], position.int(), row.int(), pages.int(), position)
    q = fused(qkv, norms, kv, fused.plan(packed, kv, table))
    assert q.is_contiguous()
    assert_near(q, expected)
    assert torch.equal(~kv.isnan(), written)
    assert_near(kv[written], kv32[written])

    kv.fill_(float("nan"))
    padded = StepLayout(0, [], [], torch.full_like(packed.positions_T, -1), packed.row_T, packed.pages_RM, position)
    assert fused(qkv, norms, kv, fused.plan(padded, kv, table)).isfinite().all()
    assert kv.isnan().all()
