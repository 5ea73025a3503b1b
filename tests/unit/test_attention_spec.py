"""Sliding windows, soft caps, sinks and scales: each way to attend against the formula, token by token, in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.kernels.attention import AttentionSpec, SplitAttention, StepLayout
from inference_service.kernels.attention_mixed import TorchPagedAttention
from inference_service.kernels.attention_torch import TorchDecode, TorchPrefill

HEADS, KV_HEADS, HEAD_DIM, PAGES = 6, 2, 16, 60
SPECS = {
    "plain": AttentionSpec(),
    "scale": AttentionSpec(scale=0.1),
    "window": AttentionSpec(window=9),
    "window-of-one": AttentionSpec(window=1),
    "wide-window": AttentionSpec(window=64),
    "soft-cap": AttentionSpec(soft_cap=2.0),
    "all": AttentionSpec(scale=0.5, window=20, soft_cap=3.0),
}


class Steps:
    """A step of decodes and prefill chunks; the slots that no token may see hold NaN, as do whole pages that belong to nobody."""

    def __init__(self, decodes: list[int], chunks: list[tuple[int, int]], page_size: int) -> None:
        """`decodes` are contexts; `chunks` are lengths and contexts."""
        torch.manual_seed(0)
        lengths, contexts = [1] * len(decodes) + [length for length, _ in chunks], decodes + [context for _, context in chunks]
        width = -(-max(contexts) // page_size)
        pages = torch.randperm(len(contexts) * width + 1)
        self.nobody, pages_RM = int(pages[0]), pages[1:].view(len(contexts), width)
        self.kv = torch.full((len(pages), 2, KV_HEADS, page_size, HEAD_DIM), float("nan"))
        for row, context in enumerate(contexts):
            for position in range(context):
                self.kv[pages_RM[row, position // page_size], :, :, position % page_size] = torch.randn(2, KV_HEADS, HEAD_DIM)
            # As the page table is padded with any page.
            pages_RM[row, -(-context // page_size) :] = self.nobody
        rows = [row for row, length in enumerate(lengths) for _ in range(length)]
        positions = [position for length, context in zip(lengths, contexts, strict=True) for position in range(context - length, context)]
        self.q = 3 * torch.randn(len(rows), HEADS, HEAD_DIM)
        self.layout = StepLayout(
            len(decodes), lengths, contexts, torch.tensor(positions), torch.tensor(rows), pages_RM, torch.tensor(contexts)
        )

    def expected(self, spec: AttentionSpec, sinks_H: Tensor | None) -> Tensor:
        layout, page_size, o_THD = self.layout, self.kv.shape[3], torch.zeros_like(self.q)
        for token, (position, row) in enumerate(zip(layout.positions_T.tolist(), layout.row_T.tolist(), strict=True)):
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            seen = [(layout.pages_RM[row, at // page_size], at % page_size) for at in range(first, position + 1)]
            for head in range(HEADS):
                keys, values = (
                    torch.stack([self.kv[page, of, head // (HEADS // KV_HEADS), slot] for page, slot in seen]).double() for of in (0, 1)
                )
                scores = keys @ self.q[token, head].double() * (spec.scale or 1 / math.sqrt(HEAD_DIM))
                if spec.soft_cap:
                    scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                powers = scores.exp()
                total = powers.sum() + (sinks_H[head].double().exp() if sinks_H is not None else 0)
                o_THD[token, head] = powers / total @ values
        return o_THD


def references() -> list[Any]:
    return [SplitAttention(TorchDecode(), TorchPrefill()), TorchPagedAttention()]


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_the_references_compute_the_formula_whatever_lies_beyond(spec: AttentionSpec, sinks: bool, page_size: int) -> None:
    # Contexts of unlike length, so that decodes are computed in groups; chunks of a whole context and of the end of one.
    steps = Steps([1, 30, 33, 9, 2], [(12, 12), (7, 31), (1, 5)], page_size)
    sinks_H = torch.randn(HEADS) if sinks else None
    expected = steps.expected(spec, sinks_H)
    for attention in references():
        o = attention(steps.q, steps.kv, attention.plan(steps.layout, steps.kv, HEADS, spec), sinks_H)
        torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)


def test_what_is_not_a_number_stays_with_the_request_that_computed_it() -> None:
    steps = Steps([30, 33], [(7, 31)], 16)
    expected = steps.expected(SPECS["plain"], None)
    steps.kv[steps.layout.pages_RM[1, 0], :, :, 3] = float("nan")
    for attention in references():
        o = attention(steps.q, steps.kv, attention.plan(steps.layout, steps.kv, HEADS))
        assert o[1].isnan().all()
        torch.testing.assert_close(o[[0, *range(2, 9)]], expected[[0, *range(2, 9)]])
