"""The requests of an open loop's level: when each is due, and of which number and shape it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inference_service.loadtest import Loadtest
from loadgen._arrivals import at_random, at_rate, evenly, share
from loadgen._levels import Load
from loadgen._trace import Entry

_LEVEL_REQUESTS = 10_000_000
"""Numbers that a level has to itself: its prompts must not be in the server's cache since the level before."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that is due `at_s` seconds after the level's beginning. None: as the workload has it."""

    index: int
    at_s: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    prefix_ids: Sequence[int] = ()


def schedule(loadtest: Loadtest, load: Load, trace: Sequence[Entry], process: int, processes: int) -> Iterator[Planned]:
    """One process's share of a level, in the order of the times; endless, but for a trace's. Of the seed and the level alone."""
    assert load.rate is not None
    base, seed = load.number * _LEVEL_REQUESTS, f"{loadtest.seed}/{load.number}"
    match load.arrival:
        case "trace":
            for number, entry in enumerate(trace):
                if number % processes == process:
                    ids = [base + hash_id for hash_id in entry.hash_ids]
                    yield Planned(base + number, entry.timestamp / 1000 / load.rate, entry.input_length, entry.output_length, ids)
            return
        case "poisson":
            arrivals = share(at_rate(at_random(f"{seed}/arrivals"), load.rate, loadtest.stages), process, processes, f"{seed}/shares")
        case _:
            arrivals = share(at_rate(evenly(), load.rate, loadtest.stages), process, processes)
    yield from (Planned(base + number, at_s) for number, at_s in arrivals)
