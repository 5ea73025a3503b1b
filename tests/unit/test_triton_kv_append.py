"""QK norm, rotation and append in one kernel against the reference, run by Triton's interpreter; skipped where triton is absent."""

from __future__ import annotations

import pytest
import torch

from inference_service.kernels.attention import StepLayout
from inference_service.kernels.kv_append import HeadNorms, TorchKvAppend, TritonKvAppend

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU")


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "tokens"),
    [(6, 2, 64, 16, 1), (32, 4, 128, 64, 3), (9, 3, 32, 5, 7), (5, 5, 64, 1, 7), (16, 16, 128, 64, 1)],
)
def test_kv_append(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    tokens: int,
    dtype: torch.dtype,
    normed: bool,
) -> None:
    fused, plain = TritonKvAppend(), TorchKvAppend()
    torch.manual_seed(0)
    pages, table = torch.randperm(12).view(3, 4), torch.randn(4 * page_size, head_dim)
    place = torch.randperm(pages.numel() * page_size)[:tokens]
    row, position = place // (4 * page_size), place % (4 * page_size)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    norms = HeadNorms(torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype), 1e-6) if normed else None
    norms32 = HeadNorms(norms.q_D.float(), norms.k_D.float(), norms.eps) if norms else None
    kv = torch.full((12, 2, kv_heads, page_size, head_dim), float("nan"), dtype=dtype)
    kv32 = kv.float().clone()
    expected = plain(qkv.float().clone(), norms32, kv32, plain.plan(StepLayout(0, [], [], position, row, pages, place), kv32, table))

    # int32, and a table that is a part of a wider one, as steps on a GPU have it.
    wide = torch.nn.functional.pad(pages, (0, 3)).int()[:, :4]
    layout = StepLayout(0, [], [], position.int(), row.int(), wide, place)
    q = fused(qkv, norms, kv, fused.plan(layout, kv, table))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert q.is_contiguous()
    torch.testing.assert_close(q.float(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(kv.float(), kv32, equal_nan=True, atol=tolerance, rtol=tolerance)

    kv.fill_(float("nan"))
    padded = StepLayout(0, [], [], -1 - layout.positions_T, layout.row_T, wide, place)
    assert fused(qkv, norms, kv, fused.plan(padded, kv, table)).equal(q)
    assert kv.isnan().all()
