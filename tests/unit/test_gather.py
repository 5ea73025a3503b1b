"""Contexts out of their pages, by Triton's interpreter, and when FA3 has them gathered; the first is skipped where triton is absent."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from inference_service.kernels.flashinfer_fa3 import CONTEXT_A_TOKEN, GATHERED_BYTES, LEAST_TOKENS, gathers, page_starts

CONTEXTS = [[1], [16], [17], [5, 48, 1, 33]]


@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
@pytest.mark.parametrize(("kv_heads", "head_dim", "page_size"), [(2, 64, 16), (3, 96, 13), (1, 32, 48), (1, 32, 200)])
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU")
def test_each_token_stands_where_its_row_has_it(contexts: list[int], kv_heads: int, head_dim: int, page_size: int) -> None:
    pytest.importorskip("triton")
    from inference_service.kernels.triton_gather import gather_contexts

    torch.manual_seed(0)
    counts = [-(-context // page_size) for context in contexts]
    pages_N = torch.randperm(40)[: sum(counts)].int()
    cache = torch.full((40, 2, kv_heads, page_size, head_dim), float("nan"))
    expected_2KHD = torch.randn(2, sum(contexts), kv_heads, head_dim)
    token = 0
    for context, first in zip(contexts, accumulate([0, *counts]), strict=False):
        for position in range(context):
            cache[pages_N[first + position // page_size], :, :, position % page_size] = expected_2KHD[:, token]
            token += 1
    memory = torch.full((expected_2KHD.numel() + 7,), float("nan"))
    kv_2KHD = memory[:-7].view(expected_2KHD.shape)
    gather_contexts(cache, pages_N, torch.tensor(page_starts(contexts, page_size), dtype=torch.int32), kv_2KHD)
    assert torch.equal(kv_2KHD, expected_2KHD) and memory[-7:].isnan().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU")
def test_values_are_numbers() -> None:
    """Else they would spoil the row before, whose kernel multiplies them with 0."""
    pytest.importorskip("triton")
    from inference_service.kernels.triton_gather import gather_contexts

    cache = torch.randn(1, 2, 1, 16, 32)
    cache[0, :, 0, [3, 5, 7], 1] = torch.tensor([float("nan"), float("inf"), float("-inf")])
    kv_2KHD = torch.empty(2, 16, 1, 32)
    gather_contexts(cache, torch.zeros(1, dtype=torch.int32), torch.tensor([0, 16], dtype=torch.int32), kv_2KHD)
    keys, values = cache[0, :, 0]
    assert torch.equal(kv_2KHD[0, :, 0].nan_to_num(), keys.nan_to_num()) and kv_2KHD[0].isnan().any()
    assert torch.equal(kv_2KHD[1, :, 0], values.nan_to_num(0.0, 0.0, 0.0))


def test_page_starts() -> None:
    assert page_starts([1], 16) == [0, 1]
    assert page_starts([33, 16, 5], 16) == [0, 16, 32, 33, 49, 54]


@pytest.mark.parametrize(
    ("lengths", "contexts", "expected"),
    [
        ([LEAST_TOKENS], [LEAST_TOKENS], True),
        ([LEAST_TOKENS - 1], [LEAST_TOKENS - 1], False),
        ([1, LEAST_TOKENS - 1], [1000, 5000], True),
        ([LEAST_TOKENS], [LEAST_TOKENS * CONTEXT_A_TOKEN], True),
        ([LEAST_TOKENS], [LEAST_TOKENS * CONTEXT_A_TOKEN + 1], False),
        ([4096, 4096], [65536, 65536], True),
        ([4096, 4096], [65536, 65537], False),
    ],
)
def test_contexts_are_gathered_of_many_tokens_as_memory_allows(lengths: list[int], contexts: list[int], expected: bool) -> None:
    cache = torch.empty(3, 2, 4, 64, 128, dtype=torch.bfloat16, device="meta")
    assert GATHERED_BYTES == 2 * 65536 * 2 * 4 * 128 * 2
    assert gathers(lengths, contexts, cache) == expected
