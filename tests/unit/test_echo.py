"""The echo executor: counts up, and always draws something."""

from __future__ import annotations

from inference_service.config import Config
from inference_service.engine.echo import EchoExecutor
from inference_service.engine.step import Row, StepPlan
from inference_service.messages import Sampling

VOCABULARY = 6


def draw(last: int, banned_ids: list[int], banned_after: list[tuple[int, int]], allowed: list[int]) -> int:
    executor = EchoExecutor(Config(), VOCABULARY, 16)
    mask = sum(1 << token_id for token_id in allowed).to_bytes(4, "little") if allowed else b""
    row = Row(0, 0, 1, [last], [0], True, Sampling(0.0, 0, 1.0, 0.0, 0))
    row.banned_ids, row.banned_after, row.allowed = banned_ids, banned_after, mask
    return executor.launch(StepPlan([row])).wait().token_ids[0]


def test_what_is_banned_or_not_permitted_is_passed_over() -> None:
    assert draw(4, [], [], []) == 5 and draw(5, [], [], []) == 0
    assert draw(1, [2], [(1, 3), (2, 4)], []) == 4
    assert draw(1, [3], [], [0, 3]) == 0


def test_bans_that_leave_nothing_do_not_hold() -> None:
    assert draw(1, list(range(VOCABULARY)), [], []) == 2
    assert draw(1, [3], [(1, 0)], [0, 3]) == 3
