"""The short form of `python -m tests.soak`."""

from __future__ import annotations

from tests.soak.__main__ import Plan, soak
from tests.soak.faults import SHORT
from tests.soak.traffic import KINDS, structured, stuck_reader

SLOW = (stuck_reader, structured)
"""It takes many seconds until the one is cut off, and the other's process of grammars is there."""


def test_under_load_and_faults_no_token_is_lost_and_all_is_let_go() -> None:
    kinds = [kind for kind in KINDS if kind.run not in SLOW]
    lines: list[str] = []
    violations = soak(Plan(8, requests_per_s=6, fault_every_s=2.0, faults=list(SHORT), kinds=kinds), lines.append)
    assert not violations, "\n".join(lines)
