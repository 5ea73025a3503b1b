"""The load generator's histogram: merging loses nothing, and percentiles are those of the raw values to the width of a bucket."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen._histogram import Histogram

nanoseconds = st.one_of(st.integers(0, 5000), st.integers(0, 10**12))
samples = st.lists(nanoseconds, max_size=200)


def histogram(values: list[int]) -> Histogram:
    result = Histogram()
    for value in values:
        result.add(value)
    return result


@given(st.lists(samples, max_size=5))
def test_merged_equals_pooled(parts: list[list[int]]) -> None:
    merged = Histogram()
    for part in parts:
        merged.merge(histogram(part))
    assert merged == histogram([value for part in parts for value in part])


@given(samples.filter(bool), st.one_of(st.integers(0, 100), st.sampled_from([99.9, 7.0, 33.3])))
def test_percentiles_are_the_nearest_rank_ones_within_a_thousandth(values: list[int], percent: float) -> None:
    rank = max(1, math.ceil(round(percent * len(values) / 100, 6)))
    exact = sorted(values)[rank - 1]
    assert abs(histogram(values).percentile(percent) - exact) <= exact / 1000


@given(samples.filter(bool))
def test_count_mean_and_extremes_are_exact(values: list[int]) -> None:
    result = histogram(values)
    assert (result.count, result.total, result.least, result.largest) == (len(values), sum(values), min(values), max(values))
    assert result.mean == sum(values) / len(values)
    assert result.percentile(0) >= min(values)
    assert result.percentile(100) <= max(values)


@given(samples, samples)
def test_many_values_at_once_are_the_same_as_one_by_one(before: list[int], values: list[int]) -> None:
    result = histogram(before)
    result.extend(values)
    assert result == histogram(before + values)


@given(samples.filter(bool))
def test_the_cumulative_counts_end_with_all_and_rise(values: list[int]) -> None:
    steps = histogram(values).cumulative()
    assert steps[-1][1] == len(values)
    assert steps == sorted(steps)


@given(samples)
def test_survives_the_way_to_the_master(values: list[int]) -> None:
    sent = histogram(values)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Histogram) == sent


@pytest.mark.parametrize("percent", [50, 90, 95, 99, 99.9])
def test_percentiles_of_four_processes_are_those_of_the_pooled_raw_data(percent: float) -> None:
    """Latencies of very different processes, long-tailed as real ones are."""
    noise = random.Random(5)
    parts = [[round(noise.lognormvariate(17 + process, 1.5)) for _ in range(5000)] for process in range(4)]
    merged = Histogram()
    for part in parts:
        merged.merge(msgspec.msgpack.decode(msgspec.msgpack.encode(histogram(part)), type=Histogram))
    pooled = sorted(value for part in parts for value in part)
    assert merged.percentile(percent) == pytest.approx(pooled[math.ceil(percent * len(pooled) / 100) - 1], rel=0.01)


def test_seven_percent_of_a_hundred_is_the_seventh_value() -> None:
    assert histogram(list(range(1, 101))).percentile(7) == 7


def test_nothing_measured() -> None:
    assert Histogram().percentile(50) == 0
    assert Histogram().mean == 0.0
