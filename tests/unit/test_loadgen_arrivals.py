"""Schedules of open loops: rates, stages, shares and traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice, pairwise, takewhile
from pathlib import Path

import pytest

from inference_service.config import ConfigError
from inference_service.loadtest import Loadtest
from loadgen._arrivals import Stage, at_random, at_rate, evenly, share
from loadgen._levels import Load
from loadgen._schedule import schedule
from loadgen._trace import read_trace


def load(arrival: str, rate: float = 10.0, number: int = 0) -> Load:
    return Load(number=number, arrival=arrival, concurrency=0, rate=rate, repeat=0)


def count_until(seconds: float, rate: float, stages: Sequence[Stage]) -> int:
    return len(list(takewhile(lambda at_s: at_s < seconds - 1e-9, at_rate(evenly(), rate, stages))))


def test_a_constant_rate_is_even() -> None:
    assert list(islice(at_rate(evenly(), 4.0), 5)) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_a_poisson_process_has_its_rate_and_its_variance() -> None:
    times = list(islice(at_rate(at_random("seed"), 50.0), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.03)
    # Exponential: the standard deviation is the mean, and 1/e of the gaps are longer than it.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.02)


@pytest.mark.parametrize(
    ("stages", "seconds", "expected"),
    [
        ([(0, 0), (10, 2)], 10, 100),  # a ramp from 0 to 20 a second over 10 s: half of 20 * 10
        ([(0, 0), (10, 2)], 20, 200),  # and once more
        ([(0, 1), (9, 1), (0, 5), (1, 5)], 10, 140),  # a burst of five times the rate in each tenth second
        ([(0, 1), (5, 1), (0, 0), (5, 0)], 20, 100),  # on and off
        ([(4, 3), (4, 1)], 8, 160),
    ],
)
def test_stages_let_through_their_integral(stages: list[Stage], seconds: float, expected: int) -> None:
    assert count_until(seconds, 10.0, stages) == pytest.approx(expected, abs=1)


def test_a_burst_comes_when_it_is_due() -> None:
    times = list(takewhile(lambda at_s: at_s < 10, at_rate(evenly(), 10.0, [(0, 1), (9, 1), (0, 5), (1, 5)])))
    assert sum(at_s >= 9 for at_s in times) == pytest.approx(50, abs=1)
    assert times == sorted(times)


@pytest.mark.parametrize("arrival", ["constant", "poisson"])
@pytest.mark.parametrize("processes", [2, 3])
def test_the_shares_of_processes_are_the_schedule(arrival: str, processes: int) -> None:
    settings, seconds = Loadtest(seed=3), 20.0

    def until(process: int, of: int) -> list[tuple[float, int]]:
        planned = schedule(settings, load(arrival), [], process, of)
        return [(p.at_s, p.index) for p in takewhile(lambda p: p.at_s < seconds, planned)]

    shares = [until(process, processes) for process in range(processes)]
    assert sorted(pair for part in shares for pair in part) == until(0, 1)
    assert all(len(part) > 200 / processes / 2 for part in shares)


def test_a_share_of_random_arrivals_is_random_itself() -> None:
    """Dealt out in turn, gaps would have half the variance."""
    times = [at_s for _, at_s in islice(share(at_random("seed"), 0, 2, "deal"), 10_000)]
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(2, rel=0.05)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


def test_a_schedule_depends_on_seed_and_level_alone() -> None:
    def first(seed: int, level: int) -> list[float]:
        return [planned.at_s for planned in islice(schedule(Loadtest(seed=seed), load("poisson", number=level), [], 0, 1), 5)]

    assert first(1, 0) == first(1, 0)
    assert len({tuple(first(seed, level)) for seed in (1, 2) for level in (0, 1)}) == 4


def test_a_trace_is_replayed_faster_with_its_lengths_and_its_prefixes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 27_000, "input_length": 6758, "output_length": 500, "hash_ids": [46, 47, 48]},
        {"timestamp": 26_000, "input_length": 7322, "output_length": 490, "hash_ids": [46, 49]},
        {"timestamp": 30_000, "input_length": 10, "output_length": 4, "hash_ids": []},
    ]
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    trace = read_trace(str(file))
    whole = list(schedule(Loadtest(), load("trace", 2.0), trace, 0, 1))
    assert [(p.at_s, p.input_tokens, p.output_tokens) for p in whole] == [(0.0, 7322, 490), (0.5, 6758, 500), (2.0, 10, 4)]
    assert whole[0].prefix_ids[0] == whole[1].prefix_ids[0] != whole[0].prefix_ids[1]
    parts = [list(schedule(Loadtest(), load("trace", 2.0), trace, process, 2)) for process in range(2)]
    assert sorted(p.index for part in parts for p in part) == [0, 1, 2]
    # A later level's prompts are not in the server's cache.
    again = list(schedule(Loadtest(), load("trace", 2.0, number=1), trace, 0, 1))
    assert not {i for p in again for i in p.prefix_ids} & {i for p in whole for i in p.prefix_ids}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n',
            "line 2: Object missing required field `input_length`",
        ),
        ('{"timestamp": 1, "input_length": 0, "output_length": 3}\n', "line 1: input_length and output_length must be at least 1"),
        ("", "no requests"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=rf"^loadtest\.trace: .*{message}"):
        read_trace(str(tmp_path / "trace.jsonl"))
    with pytest.raises(ConfigError, match=r"^loadtest\.trace: absent: No such file"):
        read_trace("absent")
