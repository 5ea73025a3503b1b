"""How long a process that dies again and again is waited for."""

from __future__ import annotations

from inference_service.rpc.backoff import Backoff


def test_waits_double_up_to_half_a_minute_and_begin_anew_after_a_healthy_minute() -> None:
    backoff = Backoff()
    assert [backoff.wait_s(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.deaths == 8
    assert [backoff.wait_s(healthy_s) for healthy_s in (60.0, 59.0, 3600.0)] == [0.5, 1, 0.5]
    for _ in range(2000):
        assert backoff.wait_s(0.0) <= 30
