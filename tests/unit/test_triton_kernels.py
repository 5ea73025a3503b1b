"""The own Triton kernels against the references, run by Triton's interpreter where there is no GPU; skipped where triton is absent."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Read when triton is first imported.
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(ON_GPU, reason="tests/gpu runs these kernels on the GPU")


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (3, 60, 4), (5, 9, 2), (2, 256, 16), (0, 8, 2)])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(generator: torch.Generator, tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    from inference_service.kernels.routing import TorchRouting, TritonRouting

    logits = torch.randn(tokens, experts, generator=generator) * 2
    ids, weights = TritonRouting()(logits, top_k, renormalize)
    expected_ids, expected_weights = TorchRouting()(logits, top_k, renormalize)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights)


def test_routing_of_logits_within_a_wider_product(generator: torch.Generator) -> None:
    """As where a shared expert's gate is the row after the router's."""
    from inference_service.kernels.routing import TorchRouting, TritonRouting

    logits = torch.randn(5, 61, generator=generator)[:, :60]
    for ours, expected in zip(TritonRouting()(logits, 4, False), TorchRouting()(logits, 4, False), strict=True):
        torch.testing.assert_close(ours, expected)


def test_routing_prefers_the_lower_of_equal_experts_and_survives_nan() -> None:
    from inference_service.kernels.routing import TritonRouting

    ids, _ = TritonRouting()(torch.tensor([[1.0, 2.0, 2.0, 1.0, 1.0]]), 4, True)
    assert ids.tolist() == [[1, 2, 0, 3]]
    ids, _ = TritonRouting()(torch.full((1, 5), float("nan")), 4, True)
    assert ((ids >= 0) & (ids < 5)).all()


@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "size", "top_k"),
    [(1, 128, 4, 64, 2), (3, 96, 9, 24, 2), (2, 100, 4, 36, 3), (1, 640, 3, 40, 2), (1, 64, 60, 16, 4)],
)
@pytest.mark.parametrize("up_first", [False, True])
def test_moe(generator: torch.Generator, tokens: int, hidden: int, experts: int, size: int, top_k: int, up_first: bool) -> None:
    from inference_service.kernels.moe import TorchMoe
    from inference_service.kernels.routing import TorchRouting
    from inference_service.kernels.triton_moe import moe_gemv

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, gate, up, down = random(tokens, hidden), random(experts, size, hidden), random(experts, size, hidden), random(experts, hidden, size)
    ids, weights = TorchRouting()(random(tokens, experts), top_k, True)
    stacked = torch.cat((up, gate) if up_first else (gate, up), dim=1)
    expected = TorchMoe()(x, torch.cat((gate, up), dim=1), down, ids, weights)
    assert error(moe_gemv(x, stacked, down, ids, weights, up_first), expected) < 1e-5
    x, stacked, down = (tensor.to(torch.bfloat16) for tensor in (x, stacked, down))
    assert error(moe_gemv(x, stacked, down, ids, weights, up_first), expected) < 1e-2


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 128, 2048), (3, 80, 96), (2, 33, 100), (8, 64, 512), (2, 61, 2048)])
@pytest.mark.parametrize("biased", [False, True])
def test_gemv(generator: torch.Generator, tokens: int, outputs: int, inputs: int, biased: bool) -> None:
    from inference_service.kernels.triton_gemm import gemv

    x, weight = torch.randn(tokens, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if biased else None
    assert error(gemv(x, weight, bias), F.linear(x, weight, bias)) < 1e-6


def parameters(rows: int, vocabulary: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows of all kinds: greedy, plain, each filter, all filters, filters that keep all or one, and a temperature near 0."""
    cases = [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, 0, 0.9, 0.0),
        (1.0, 50, 0.8, 0.05),
        (1.0, 0, 1.0, 0.1),
        (0.5, (1 << 31) - 1, 0.5, 0.0),
        (1.0, 1, 1.0, 0.0),
        (0.0, 3, 0.5, 0.3),
        (1e-30, 0, 0.9, 0.0),
        (1.0, vocabulary - 1, 0.99, 0.0),
        (1.0, 0, 1e-9, 0.0),
    ]
    columns: list[Any] = list(zip(*(cases[row % len(cases)] for row in range(rows)), strict=True))
    return {
        "temperature_R": torch.tensor(columns[0], dtype=torch.float32),
        "top_k_R": torch.tensor(columns[1], dtype=torch.int32),
        "top_p_R": torch.tensor(columns[2], dtype=torch.float32),
        "min_p_R": torch.tensor(columns[3], dtype=torch.float32),
        "seed_R": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        "position_R": torch.randint(0, 100_000, (rows,), generator=generator, dtype=torch.int32),
    }


def test_draws_are_those_of_the_reference(generator: torch.Generator) -> None:
    from inference_service.kernels.sampling import TorchSampling, TritonSampling

    vocabulary = 4200  # Two chunks.
    logits = torch.randn(12, vocabulary, generator=generator) * 2
    logits[:, 7] = float("-inf")
    rows = parameters(12, vocabulary, generator)
    drawn = TritonSampling().sample_padded(logits, **rows)
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn, TorchSampling().sample_padded(logits, **rows))
    assert torch.equal(TritonSampling().greedy(logits), logits.argmax(-1))


def test_equal_logits_share_their_fate(generator: torch.Generator) -> None:
    """bfloat16 makes many ties; a kept one keeps the others."""
    from inference_service.kernels.sampling import TorchSampling, TritonSampling

    logits = torch.randn(12, 600, generator=generator).to(torch.bfloat16)
    rows = parameters(12, 600, generator)
    assert torch.equal(TritonSampling().sample_padded(logits, **rows), TorchSampling().sample_padded(logits, **rows))


def test_sampling_by_a_step_s_draws(generator: torch.Generator) -> None:
    from inference_service.engine.step import Row, StepPlan
    from inference_service.execution.batch import pack
    from inference_service.kernels.sampling import TorchSampling, TritonSampling
    from inference_service.messages import Sampling

    logits = torch.randn(4, 300, generator=generator)
    kinds = [Sampling(0.0, 0, 1.0, 0.0, 1), Sampling(0.8, 20, 1.0, 0.0, 2), Sampling(1.0, 0, 0.9, 0.0, 3), Sampling(1.0, 0, 1.0, 0.05, -4)]
    for hows in (kinds, kinds[:1] * 4, [kinds[3]] * 4):
        rows = [Row(slot, 2 * slot, 1, [], [0], True, how) for slot, how in enumerate(hows)]
        draws = pack(StepPlan(rows), page_size=16).draws()
        assert torch.equal(TritonSampling()(logits, draws), TorchSampling()(logits, draws))
