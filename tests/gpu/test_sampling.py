"""Draws on the GPU: equal to the reference's, spread as the exact probabilities say, and the same in a CUDA graph and in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_service.kernels.flashinfer_sampling import FlashInferSampling
from inference_service.kernels.sampling import TorchSampling, TritonSampling, gumbel
from inference_service.messages import Sampling
from tests.unit.test_sampling import LOGITS, chi_square, exact
from tests.unit.test_triton_kernels import parameters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

VOCABULARY = 151_936


def rows_of(count: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """All kinds of rows, in turns."""
    made = parameters(count, vocabulary, torch.Generator().manual_seed(0))
    return {name: tensor.cuda() for name, tensor in made.items()}


def logits_of(rows: int, vocabulary: int = VOCABULARY, spread: float = 2.5) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * spread


def agreement(drawn: Tensor, expected: Tensor) -> float:
    return (drawn == expected).float().mean().item()


@pytest.mark.parametrize("rows", [1, 12, 64])
@pytest.mark.parametrize("vocabulary", [100, 4096, 49_152, VOCABULARY])
def test_draws_are_those_of_the_reference(rows: int, vocabulary: int) -> None:
    """Logarithms and sums may differ in their last place, so a draw or a cut in a thousand may be decided otherwise."""
    logits, how = logits_of(rows, vocabulary), rows_of(rows, vocabulary)
    logits[:, 7] = float("-inf")
    drawn = TritonSampling().sample_padded(logits, **how)
    assert (drawn.dtype, drawn.shape) == (torch.int64, (rows,))
    assert agreement(drawn, TorchSampling().sample_padded(logits, **how)) >= (0.98 if rows == 64 else 1.0)


@pytest.mark.parametrize("spread", [0.001, 1.0, 20.0])
def test_draws_of_bfloat16_logits(spread: float) -> None:
    """Flat and steep; many logits are equal."""
    logits, how = logits_of(120, 20_000, spread).to(torch.bfloat16), rows_of(120, 20_000)
    assert agreement(TritonSampling().sample_padded(logits, **how), TorchSampling().sample_padded(logits, **how)) >= 0.98


def test_the_noise_is_the_reference_s() -> None:
    """Among equal logits the noise alone decides: 4,096 draws from 151,936 tokens find its maximum."""
    rows = 4096
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cuda")
    positions = torch.randint(0, 1 << 40, (rows,), device="cuda")
    expected = torch.cat([gumbel(seeds[i : i + 256], positions[i : i + 256], VOCABULARY).argmax(-1) for i in range(0, rows, 256)])
    one, none = torch.ones(rows, device="cuda"), torch.zeros(rows, device="cuda")
    logits = torch.zeros(1, VOCABULARY, device="cuda", dtype=torch.bfloat16).expand(rows, -1)
    drawn = TritonSampling().sample_padded(logits, one, none.int(), one, none, seeds, positions)
    assert agreement(drawn, expected) > 0.998


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p", "left"),
    [
        (1.0, 0, 1.0, 0.0, 12),
        (0.6, 0, 1.0, 0.0, 12),
        (1.0, 5, 1.0, 0.0, 5),
        (1.0, 0, 0.8, 0.0, 5),
        (1.0, 0, 1.0, 0.2, 6),
        (1.5, 8, 0.9, 0.0, 7),
        (1.0, 6, 1.0, 0.3, 5),
        (0.8, 0, 0.95, 0.15, 6),
        (1.3, 9, 0.97, 0.25, 7),
        (1.0, 1, 1.0, 0.0, 1),
        (1.0, 0, 1e-9, 0.0, 1),
        (1.0, 500, 1.0, 0.0, 12),
    ],
)
@pytest.mark.parametrize(("make", "vocabulary"), [(TritonSampling, VOCABULARY), (FlashInferSampling, 5003)])
def test_draws_follow_the_exact_distribution(
    make: type[TritonSampling], vocabulary: int, temperature: float, top_k: int, top_p: float, min_p: float, left: int
) -> None:
    """The tokens that count lie far apart in a large vocabulary; the others are out of reach."""
    count, (row, places) = 20_000, apart(vocabulary)
    logits = row.expand(count, -1)

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device="cuda")

    filters = column(temperature), column(top_k, torch.int32), column(top_p), column(min_p)
    drawn = make().sample_padded(logits, *filters, column(7, torch.int64), torch.arange(count, device="cuda", dtype=torch.int32))
    counts = drawn.cpu().bincount(minlength=vocabulary)
    assert counts.sum() == counts[places].sum()
    probabilities = torch.tensor(exact(LOGITS.tolist(), Sampling(temperature, top_k, top_p, min_p, 7)))
    possible = probabilities > 0
    assert possible.sum() == left
    assert counts[places][~possible].sum() == 0
    if left > 1:
        assert chi_square(counts[places][possible], probabilities[possible]) > 1e-4


def apart(vocabulary: int) -> tuple[Tensor, Tensor]:
    """LOGITS in one row of a large vocabulary, the rest of which is out of reach, and where they are."""
    places = torch.arange(12) * (vocabulary // 13) + 77
    row = torch.full((1, vocabulary), -1e4)
    row[0, places] = LOGITS
    return row.cuda(), places


def by_sorting(probabilities_V: Tensor, count: int, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Draws from what is left when the sorted probabilities are cut: the plain way."""
    ordered, ids = probabilities_V.sort(descending=True)
    ordered[top_k or len(ordered) :] = 0
    ordered[ordered.cumsum(0) - ordered >= top_p * ordered.sum()] = 0
    ordered[ordered < min_p * ordered[0]] = 0
    return ids[ordered.multinomial(count, replacement=True)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (8, 0.9, 0.0)])
def test_flashinfer_s_own_draws_follow_the_exact_distribution_and_that_of_sorting(top_k: int, top_p: float, min_p: float) -> None:
    """Their seed is one for a batch, so that no request can rely on it; hence our noise. What they keep is what we keep."""
    from flashinfer import sampling

    torch.manual_seed(0)
    count, (row, places) = 50_000, apart(VOCABULARY)
    p, same_row = row.softmax(-1), torch.zeros(count, dtype=torch.int32, device="cuda")
    if min_p:
        drawn = sampling.min_p_sampling_from_probs(p, min_p, indices=same_row)
    elif top_k and top_p < 1:
        drawn = sampling.top_k_top_p_sampling_from_probs(p, top_k, top_p, indices=same_row)
    elif top_k:
        drawn = sampling.top_k_sampling_from_probs(p, top_k, indices=same_row)
    else:
        drawn = sampling.top_p_sampling_from_probs(p, top_p, indices=same_row)
    theirs = drawn.long().cpu().bincount(minlength=VOCABULARY)[places]
    sorted_s = by_sorting(p[0], count, top_k, top_p, min_p).cpu().bincount(minlength=VOCABULARY)[places]
    probabilities = torch.tensor(exact(LOGITS.tolist(), Sampling(1.0, top_k, top_p, min_p, 7)))
    possible = probabilities > 0
    assert theirs[possible].sum() == sorted_s[possible].sum() == count
    assert chi_square(theirs[possible], probabilities[possible]) > 1e-4
    assert chi_square(sorted_s[possible], probabilities[possible]) > 1e-4
    # Of two samples of one size: (a - b)^2 / (a + b) sums to chi-square.
    statistic = ((theirs - sorted_s)[possible].double() ** 2 / (theirs + sorted_s)[possible]).sum()
    assert float(torch.special.gammaincc((possible.sum() - 1).double() / 2, statistic / 2)) > 1e-4


def test_flashinfer_filters_draw_what_the_reference_draws() -> None:
    logits, how = logits_of(64, 20_000), rows_of(64, 20_000)
    drawn = FlashInferSampling().sample_padded(logits, **how)
    assert (drawn.dtype, drawn.shape) == (torch.int64, (64,))
    assert agreement(drawn, TorchSampling().sample_padded(logits, **how)) >= 0.95, "a token at a filter's edge may fall either way"


def test_filters_keep_the_same_tokens_at_the_real_size() -> None:
    """By support: 300 seeds of one row with each filter draw only what sorting keeps, and the rarest of it is reached often enough."""
    logits = logits_of(1, spread=3.0)
    probabilities = logits[0].double().softmax(-1).sort(descending=True)
    inside = int((probabilities.values.cumsum(0) - probabilities.values < 0.6).sum())
    kept = {"top_k": probabilities.indices[:40], "top_p": probabilities.indices[:inside]}
    for name, allowed in kept.items():
        count = 300
        ones = torch.ones(count, device="cuda")
        top_k = torch.full((count,), 40 if name == "top_k" else 0, dtype=torch.int32, device="cuda")
        top_p = ones * (0.6 if name == "top_p" else 1.0)
        seeds, positions = torch.arange(count, device="cuda"), torch.ones(count, dtype=torch.int32, device="cuda")
        drawn = TritonSampling().sample_padded(logits.expand(count, -1), ones * 50, top_k, top_p, ones * 0, seeds, positions)
        if name == "top_k":
            assert torch.isin(drawn, allowed).all()
            assert len(set(drawn.tolist())) > 35
        drawn = TritonSampling().sample_padded(logits.expand(count, -1), ones, top_k, top_p, ones * 0, seeds, positions)
        assert torch.isin(drawn, allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_greedy(dtype: torch.dtype) -> None:
    logits = logits_of(33).to(dtype)
    drawn = TritonSampling().greedy(logits)
    best = logits.amax(-1, keepdim=True)
    assert torch.equal(logits.gather(1, drawn.unsqueeze(1)), best)
    assert torch.equal(drawn, (logits == best).int().argmax(-1))


def test_a_draw_depends_on_its_row_alone() -> None:
    logits, how = logits_of(24), rows_of(24)
    sampling = TritonSampling()
    together = sampling.sample_padded(logits, **how)
    backwards = sampling.sample_padded(logits.flip(0), **{name: tensor.flip(0) for name, tensor in how.items()})
    assert torch.equal(together, backwards.flip(0))
    for row in range(12):
        alone = sampling.sample_padded(logits[row : row + 1], **{name: tensor[row : row + 1].clone() for name, tensor in how.items()})
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("make", [TritonSampling, FlashInferSampling])
def test_in_a_cuda_graph(make: type[TritonSampling]) -> None:
    """Captured once, replayed on other logits and other parameters."""
    sampling, logits, how = make(), logits_of(12).to(torch.bfloat16), rows_of(12)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        sampling.sample_padded(logits, **how)
        sampling.greedy(logits)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            drawn, best = sampling.sample_padded(logits, **how), sampling.greedy(logits)
        for _ in range(3):
            logits.normal_(0, 2)
            how["position_R"].add_(1)
            for name in ("temperature_R", "top_k_R", "top_p_R", "min_p_R"):
                how[name].copy_(how[name].roll(1))
            graph.replay()
            assert torch.equal(drawn, sampling.sample_padded(logits, **how))
            assert torch.equal(best, sampling.greedy(logits))


def test_a_step_s_draws_are_those_of_padded_rows() -> None:
    from inference_service.engine.step import Row, StepPlan
    from inference_service.execution.batch import InputBuffers, pack

    hows = [(0.0, 0, 1.0, 0.0), (0.8, 20, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05)]
    plan = StepPlan([Row(slot, slot, 1, [], [0], True, Sampling(*how, seed=slot)) for slot, how in enumerate(hows)])
    step = InputBuffers(4, 8, 4, torch.device("cuda")).fill(pack(plan, page_size=16))
    logits = logits_of(4, 5000)
    assert torch.equal(TritonSampling()(logits, step.draws()), TorchSampling()(logits, step.draws()))
