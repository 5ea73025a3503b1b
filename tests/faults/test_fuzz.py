"""The short form of `python -m tests.fuzz`, with the same inputs each time."""

from __future__ import annotations

from tests.fuzz.__main__ import fuzz


def test_random_input_is_refused_or_served_and_leaves_nothing_behind() -> None:
    fuzz(500, seed=1, report=lambda line: None)
