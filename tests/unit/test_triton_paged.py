"""Paged attention of a whole step in one kernel against the reference, run by Triton's interpreter; skipped where triton is absent."""

from __future__ import annotations

import pytest
import torch

from inference_service.kernels.attention import AttentionSpec, SplitAttention, StepLayout
from inference_service.kernels.attention_mixed import TorchPagedAttention
from inference_service.kernels.attention_torch import TorchDecode, TorchPrefill

POSITIONS = {
    "ragged": ([0, 69, 129, 7, 8, 9, 128, 129, 0, 1], [0, 1, 2, 3, 3, 3, 4, 4, 5, 5]),
    "padded": ([63, -1, 64, 65, -1, -66], [0, 7, 1, 1, 2, 1]),
}


def make(positions: list[int], rows: list[int], heads: int, kv_heads: int, head_dim: int, page_size: int) -> tuple[torch.Tensor, ...]:
    """Queries, a cache that is NaN where no token may look, positions, rows, and a table that is part of a wider one."""
    torch.manual_seed(0)
    width = -(-192 // page_size)
    pages_RM = torch.randperm(8 * width).view(8, width)
    kv = torch.full((8 * width, 2, kv_heads, page_size, head_dim), float("nan"))
    for row in range(8):
        length = 1 + max((position for position, of in zip(positions, rows, strict=True) if of == row), default=-1)
        for position in range(length):
            kv[pages_RM[row, position // page_size], :, :, position % page_size] = torch.randn(2, kv_heads, head_dim)
    q = torch.randn(len(positions), heads, head_dim)
    return q, kv, torch.tensor(positions).int(), torch.tensor(rows).int(), torch.nn.functional.pad(pages_RM, (0, 3)).int()[:, :width]


@pytest.mark.usefixtures("loop_bounds")
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("steps", POSITIONS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "dtype"),
    [
        (8, 1, 128, 64, torch.float16),
        (9, 3, 64, 16, torch.float16),
        (2, 2, 64, 64, torch.float32),
        (2, 2, 128, 64, torch.float16),
        (16, 1, 64, 48, torch.float32),
        (3, 1, 128, 128, torch.float32),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU")
def test_against_the_reference(
    steps: str, heads: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, splits: int
) -> None:
    from inference_service.kernels.triton_paged import attend

    q, kv, positions, rows, pages = make(*POSITIONS[steps], heads, kv_heads, head_dim, page_size)
    q, kv = q.to(dtype), kv.to(dtype)
    layout = StepLayout(0, [], [], positions, rows, pages, positions)
    reference = TorchPagedAttention()
    expected = reference(q.float(), kv.float(), reference.plan(layout, kv, heads))
    o = torch.full_like(q, float("nan"))
    attend(q, kv, positions, rows, pages, splits, o, head_dim**-0.5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(o.float(), expected, atol=tolerance, rtol=tolerance)
    assert not o[positions == -1].any()


@pytest.mark.usefixtures("loop_bounds")
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("spec", "sinks"),
    [
        (AttentionSpec(), True),
        (AttentionSpec(scale=0.3, window=64), False),
        (AttentionSpec(window=1), True),
        (AttentionSpec(window=100, soft_cap=1.5), True),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU")
def test_windows_soft_caps_and_sinks_against_the_reference(spec: AttentionSpec, sinks: bool, splits: int) -> None:
    from inference_service.kernels.triton_paged import attend

    q, kv, positions, rows, pages = make([0, 69, 129, 190, -1, -66], [0, 1, 2, 3, 7, 1], 3, 1, 64, 16)
    sinks_H = torch.randn(3) if sinks else None
    layout = StepLayout(0, [], [], positions, rows, pages, positions)
    reference = TorchPagedAttention()
    expected = reference(q, kv, reference.plan(layout, kv, 3, spec), sinks_H)
    o = torch.full_like(q, float("nan"))
    attend(q, kv, positions, rows, pages, splits, o, spec.scale_for(64), spec.soft_cap, spec.window, sinks_H)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    assert not o[positions == -1].any()


def test_the_reference_agrees_with_that_of_decodes_and_prefills() -> None:
    positions, rows = POSITIONS["ragged"]
    q, kv, positions_T, row_T, pages = make(positions, rows, 6, 2, 16, 16)
    lengths, contexts = [1, 1, 1, 3, 2, 2], [1, 70, 130, 10, 130, 2]
    layout = StepLayout(3, lengths, contexts, positions_T.long(), row_T.long(), pages.long()[:6], torch.tensor(contexts))
    kv = kv.nan_to_num(0.0)
    ours, split = TorchPagedAttention(), SplitAttention(TorchDecode(), TorchPrefill())
    torch.testing.assert_close(ours(q, kv, ours.plan(layout, kv, 6)), split(q, kv, split.plan(layout, kv, 6)))
