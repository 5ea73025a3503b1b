"""The levels that a run goes through."""

from __future__ import annotations

from typing import Any

import pytest

from inference_service.config import ConfigError
from inference_service.loadtest import Loadtest, Slo
from loadgen._levels import check, loads

TTFT = Slo(ttft_ms=100)


def run(loadtest: Loadtest, limit: float) -> list[float]:
    """The loads tried against a server that meets the SLO up to `limit`."""
    tried: list[float] = []
    levels = loads(loadtest)
    try:
        load = next(levels)
        while True:
            assert load.number == len(tried)
            tried.append(load.concurrency if load.rate is None else load.rate)
            load = levels.send(tried[-1] <= limit)
    except StopIteration:
        return tried


def test_a_sweep_is_run_whole_and_then_again() -> None:
    assert run(Loadtest(concurrency=(1, 8, 4), repeats=2), 0) == [1, 8, 4, 1, 8, 4]
    assert run(Loadtest(arrival="poisson", rate=(0.5, 2.0)), 0) == [0.5, 2.0]


def test_levels_have_names_of_their_own() -> None:
    names = [load.name for load in loads(Loadtest(arrival="constant", rate=(0.5, 2.0), repeats=2))]
    assert names == ["0.5 requests/s", "2 requests/s", "0.5 requests/s #2", "2 requests/s #2"]


@pytest.mark.parametrize("limit", range(1, 65))
def test_a_search_finds_the_highest_concurrency(limit: int) -> None:
    tried = run(Loadtest(concurrency=(1, 64), search=True, slo=TTFT), limit)
    best = max(value for value in tried if value <= limit)
    assert best == limit or limit / best <= 1.05
    assert len(tried) == len(set(tried)) <= 9


@pytest.mark.parametrize("limit", [0.11, 1.0, 3.7, 19.0])
def test_a_search_finds_the_highest_rate_to_five_percent(limit: float) -> None:
    tried = run(Loadtest(arrival="poisson", rate=(0.1, 20.0), search=True, slo=TTFT), limit)
    best = max(value for value in tried if value <= limit)
    assert 1 <= limit / best <= 1.06
    assert len(tried) <= 10


def test_a_search_ends_at_once_where_all_or_nothing_meets_the_slo() -> None:
    settings = Loadtest(concurrency=(2, 64), search=True, slo=TTFT)
    assert run(settings, 1) == [2]
    assert run(settings, 100) == [2, 64]


def test_a_search_repeats_a_load_until_it_fails() -> None:
    assert run(Loadtest(concurrency=(2, 3), repeats=2, search=True, slo=TTFT), 2) == [2, 2, 3]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search": True, "concurrency": (1, 8)}, "loadtest.search: needs a limit in loadtest.slo"),
        ({"search": True, "slo": TTFT}, "loadtest.search: needs two different levels in loadtest.concurrency"),
        ({"search": True, "slo": TTFT, "arrival": "poisson"}, "loadtest.search: needs two different levels in loadtest.rate"),
        ({"arrival": "trace"}, "loadtest.trace: a file goes with loadtest.arrival=trace"),
        ({"trace": "file"}, "loadtest.trace: a file goes with loadtest.arrival=trace"),
        ({"stages": ((1.0, 1.0),)}, "loadtest.stages: nothing to change with loadtest.arrival=closed"),
        ({"arrival": "constant", "stages": ((0.0, 1.0), (5.0, 0.0), (0.0, 1.0), (0.0, 0.0))}, None),
        ({"arrival": "constant", "stages": ((0.0, 1.0), (0.0, 0.0), (5.0, 0.0))}, "loadtest.stages: they let no request through"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        check(Loadtest(**settings))
        return
    with pytest.raises(ConfigError) as error:
        check(Loadtest(**settings))
    assert str(error.value).startswith(message)
