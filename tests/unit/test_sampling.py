"""Draws follow the exact distribution, and depend on nothing but logits, parameters, seed and position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inference_service.engine.step import Row, StepPlan
from inference_service.execution.batch import pack
from inference_service.execution.edits import LogitEdits
from inference_service.execution.sampler import sample
from inference_service.kernels.sampling import TorchSampling, _filter, gumbel
from inference_service.messages import Sampling

LOGITS = torch.tensor([2.1, 0.3, -1.0, 1.7, 0.0, 0.9, -2.5, 1.2, -0.4, 2.0, -6.0, 0.6])


def draw(logits_RV: Tensor, sampling: list[Sampling], positions: list[int], banned: list[list[int]] | None = None) -> list[int]:
    """Draw through the whole way: rows of a plan, packed, sampled."""
    banned = banned or [[] for _ in sampling]
    rows = [
        Row(slot, position - 1, 1, [], list(range(position)), True, how, banned_ids=ids)
        for slot, (how, position, ids) in enumerate(zip(sampling, positions, banned, strict=True))
    ]
    step = pack(StepPlan(rows), page_size=max(positions))
    editor = LogitEdits(torch.zeros(len(rows), dtype=torch.int64))
    ids_R, _ = sample(
        logits_RV, step.tensors.scored_Y, step.alternatives, step.edits, editor, lambda edited_RV: TorchSampling()(edited_RV, step.draws())
    )
    ids: list[int] = ids_R.tolist()
    return ids


def exact(logits: list[float], how: Sampling) -> list[float]:
    """Probabilities by the definition: each filter over what the one before it left."""
    weights = [math.exp(logit / how.temperature) for logit in logits]
    kept = sorted(range(len(logits)), key=lambda token: -weights[token])
    if how.top_k:
        kept = kept[: how.top_k]
    total, cumulative, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if cumulative < how.top_p * total:
            nucleus.append(token)
        cumulative += weights[token]
    kept = [token for token in nucleus if weights[token] >= how.min_p * weights[nucleus[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """The probability of counts at least so far from expectation."""
    expected = probabilities.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


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
        (1.0, 0, 1.0, 1.0, 1),
        (1.0, 500, 1.0, 0.0, 12),
    ],
)
def test_draws_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float, min_p: float, left: int) -> None:
    count = 30_000
    how = Sampling(temperature, top_k, top_p, min_p, seed=7)
    # One distribution drawn at many positions, all in one batch: pack() would be the slow part, so one row is repeated on the device.
    step = pack(StepPlan([Row(0, 0, 1, [], [0], True, how)]), page_size=1)
    draws = step.draws()
    repeated = {name: getattr(draws, name).repeat(count) for name in ("temperature_X", "top_k_X", "top_p_X", "min_p_X", "seed_X")}
    rows = torch.arange(count)
    filtered = rows if len(draws.filtered_F) else draws.filtered_F
    batch = type(draws)(
        random_X=rows, filtered_F=filtered, top_k_limit=draws.top_k_limit, any_top_p=draws.any_top_p, position_X=rows + 1, **repeated
    )
    ids = TorchSampling()(LOGITS.expand(count, -1), batch)
    probabilities = torch.tensor(exact(LOGITS.tolist(), how))
    counts = ids.bincount(minlength=len(LOGITS))
    possible = probabilities > 0
    assert possible.sum() == left
    assert counts[~possible].sum() == 0
    if left > 1:
        assert chi_square(counts[possible], probabilities[possible]) > 1e-4


def test_rows_of_different_filters_share_a_batch() -> None:
    hows = [
        Sampling(0.0, 0, 1.0, 0.0, 1),
        Sampling(1.0, 2, 1.0, 0.0, 2),
        Sampling(0.7, 0, 0.5, 0.0, 3),
        Sampling(1.2, 0, 1.0, 0.0, 4),
        Sampling(1.0, 0, 1.0, 0.5, 5),
        Sampling(1.0, 4, 0.9, 0.1, 6),
    ]
    logits = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    positions = [3, 9, 1, 5, 8, 2]
    together = draw(logits, hows, positions)
    assert together == [draw(logits[i : i + 1], [hows[i]], [positions[i]])[0] for i in range(6)]
    backwards = draw(logits.flip(0), hows[::-1], positions[::-1])
    assert together == backwards[::-1]
    assert together[0] == int(logits[0].argmax())


def test_a_seed_of_64_bits_counts_in_full() -> None:
    logits = torch.zeros(1, 1000)
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1]
    ids = [tuple(draw(logits, [Sampling(1.0, 0, 1.0, 0.0, seed)], [position])[0] for position in (1, 2, 3)) for seed in seeds]
    assert len(set(ids)) == len(seeds)


@given(st.integers(0, 10**6), st.sampled_from([0, 1, 3, 50, 1000]), st.floats(0.01, 1.0), st.sampled_from([0.0, 0.01, 0.3]))
@settings(max_examples=100, deadline=None)
def test_filters_keep_what_their_definition_keeps(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    """By support: with noise that favours each token in turn, exactly the kept ones can be drawn."""
    logits = (torch.randn(60, generator=torch.Generator().manual_seed(seed)) * 3).tolist()
    how = Sampling(0.7, top_k, top_p, min_p, seed)
    kept = {token for token, probability in enumerate(exact(logits, how)) if probability > 0}
    best = max(logits)
    relative = torch.tensor([[(logit - best) / how.temperature for logit in logits]])
    row = Row(0, 0, 1, [], [0], True, how)
    filtered = _filter(relative, pack(StepPlan([row]), page_size=1).draws())[0] if (top_k or top_p < 1 or min_p) else relative[0]
    assert {token for token in range(60) if filtered[token] > float("-inf")} == kept


class TopKWidths(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many rows each top-k is of, and how many columns it gives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.topk.default:
            self.seen.append((len(args[0]), args[1]))
        return func(*args, **(kwargs or {}))


some_filters = st.tuples(st.sampled_from([0, 1, 3, 50]), st.sampled_from([1.0, 0.9, 0.3]), st.sampled_from([0.0, 0.1]))


@given(st.lists(some_filters, min_size=1, max_size=6), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_rows_with_and_without_top_k_do_not_touch_each_other(filters: list[tuple[int, float, float]], seed: int) -> None:
    """What each keeps is what it keeps alone, and none pays for the k best of a row that keeps all."""
    relative = torch.randn(len(filters), 60, generator=torch.Generator().manual_seed(seed))
    relative -= relative.amax(dim=1, keepdim=True)
    rows = [Row(slot, 0, 1, [], [0], True, Sampling(1.0, *each, seed)) for slot, each in enumerate(filters)]
    filtered = [place for place, (top_k, top_p, min_p) in enumerate(filters) if top_k or top_p < 1 or min_p]
    if not filtered:
        return
    with TopKWidths() as widths:
        kept = _filter(relative[filtered], pack(StepPlan(rows), page_size=1).draws())
    limited = [top_k for top_k, _, _ in filters if top_k]
    assert widths.seen == ([(len(limited), max(limited))] if limited else [])
    for row, place in enumerate(filtered):
        alone = _filter(relative[place : place + 1], pack(StepPlan([rows[place]]), page_size=1).draws())[0]
        assert torch.equal(kept[row], alone)
        probabilities = exact(relative[place].tolist(), rows[place].sampling)
        assert [logit > float("-inf") for logit in alone.tolist()] == [probability > 0 for probability in probabilities]


def test_banned_ids_are_never_drawn() -> None:
    logits = torch.tensor([[5.0, 4.0, 1.0, 0.0]]).repeat(2, 1)
    hows = [Sampling(0.0, 0, 1.0, 0.0, 0), Sampling(1.0, 1, 1.0, 0.0, 0)]
    assert draw(logits, hows, [1, 1], [[0], [0, 1]]) == [1, 2]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1)) * 100
    assert draw(logits, [Sampling(temperature, 0, 0.9, 0.0, seed) for seed in range(8)], [1] * 8) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_draw_as_their_float32_values(dtype: torch.dtype) -> None:
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    hows = [Sampling(0.9, 20 * (row % 2), 0.9, 0.0, row) for row in range(16)]
    assert draw(logits, hows, [4] * 16) == draw(logits.float(), hows, [4] * 16)


def noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    return gumbel(seeds.to(torch.int64), positions.to(torch.int64), vocabulary)


def uniforms(noise_XV: Tensor) -> Tensor:
    """Undo the Gumbel transform."""
    return (-(-noise_XV.double()).exp()).exp()


def test_noise_is_uniform_and_finite() -> None:
    values = noise(torch.full((64,), 11), torch.arange(64), 50_000)
    assert values.isfinite().all()
    counts = torch.histc(uniforms(values).float(), bins=1000, min=0.0, max=1.0)
    assert chi_square(counts, torch.full((1000,), 1e-3)) > 1e-4
    # The tail that wins draws: 3.2 million values reach e^-15, and are spread as the exponential law says.
    tail = (values > math.log(1e5)).sum().item()
    assert abs(tail - 32) < 6 * math.sqrt(32)
    assert values.max() > math.log(3e5)


@pytest.mark.parametrize("step", ["position", "seed", "token", "seed and position"])
def test_neighbouring_noise_is_independent(step: str) -> None:
    rows = torch.arange(400)
    here = uniforms(noise(rows * 0 + 5, rows, 2001) if step in ("position", "token") else noise(rows, rows * 0 + 5, 2001))
    one, other = {
        "position": (here[:-1], here[1:]),
        "seed": (here[:-1], here[1:]),
        "token": (here[:, :-1], here[:, 1:]),
        # (seed + 1, position) and (seed, position + 1) must not share noise either.
        "seed and position": (here[1:], uniforms(noise(rows, rows * 0 + 6, 2001))[:-1]),
    }[step]
    cells = (one * 8).long() * 8 + (other * 8).long()
    assert chi_square(cells.flatten().bincount(minlength=64), torch.full((64,), 1 / 64)) > 1e-4
    assert (one == other).double().mean() < 1e-4


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**20), st.integers(0, 2**64 - 1), st.integers(0, 2**20))
@settings(max_examples=100, deadline=None)
def test_noise_differs_by_seed_and_position(seed: int, position: int, other_seed: int, other_position: int) -> None:
    def signed(value: int) -> int:
        return value - (1 << 64) if value >> 63 else value

    pair = noise(torch.tensor([signed(seed), signed(other_seed)]), torch.tensor([position, other_position]), 64)
    assert bool((pair[0] == pair[1]).all()) == ((seed, position) == (other_seed, other_position))
    assert torch.equal(pair[1:], noise(torch.tensor([signed(other_seed)]), torch.tensor([other_position]), 64))


def test_noise_is_the_hash_as_written() -> None:
    """Integers of Python agree: kernels on other devices must draw the same, so each bit is part of the interface."""

    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        return bits ^ bits >> 16

    def expected(seed: int, position: int, token: int) -> float:
        keys = [0x243F6A88, 0x13198A2E]
        for word in (seed & 0xFFFFFFFF, seed >> 32, 0, position & 0xFFFFFFFF, position >> 32):
            keys = [mix(key ^ word) + 0x3707344A & 0xFFFFFFFF for key in keys]
        bits = mix(mix(token ^ keys[0]) ^ keys[1])
        return -math.log(-math.log1p(-(bits + 0.5) * 2.0**-32))

    values = noise(torch.tensor([42, -2]), torch.tensor([1, 70_000]), 5000)
    for row, seed, position in ((0, 42, 1), (1, 2**64 - 2, 70_000)):
        for token in range(0, 5000, 7):
            assert float(values[row, token]) == pytest.approx(expected(seed, position, token), rel=1e-5, abs=1e-5)
