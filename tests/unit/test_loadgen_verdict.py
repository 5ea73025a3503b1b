"""When a level is not to be trusted, when it is not steady, and what repeats say."""

from __future__ import annotations

import pytest

from inference_service.loadtest import Slo
from loadgen._figures import interval, level_of, repeated
from loadgen._levels import Load
from loadgen._measures import Measures, Window
from loadgen._result import Second
from loadgen._target import ErrorClass, Failure, Observation
from loadgen._verdict import judge, steadiness

MS = 1_000_000
LOAD = Load(number=0, arrival="closed", concurrency=2, rate=None, repeat=0)


def measured(**sums: int) -> Measures:
    measures = Measures(began_unix_ns=1, ended_unix_ns=10**9)
    measures.receive_lag.extend([MS] * 1000)
    for name, value in sums.items():
        getattr(measures, name).extend([value] * 20)
    return measures


def test_a_quiet_run_is_trusted() -> None:
    assert judge(measured(schedule_lag=2 * MS), lost=0).trusted


@pytest.mark.parametrize(
    ("measures", "lost", "reason"),
    [
        (Measures(), 0, "nothing was measured"),
        (Measures(began_unix_ns=1, cut_off=2), 0, "nothing was measured: no request ended"),
        (measured(), 1, "1 of its processes did not report to the end"),
        (measured(receive_lag=30 * MS), 0, "messages were read 30 ms late at p99, more than 20"),
        (measured(schedule_lag=25 * MS), 0, "requests were sent 25 ms after they were due at p99, more than 20"),
    ],
)
def test_what_takes_the_trust_away(measures: Measures, lost: int, reason: str) -> None:
    verdict = judge(measures, lost)
    assert not verdict.trusted
    assert verdict.reasons[0].startswith(reason)


def test_one_long_stall_and_a_full_core_take_it_away_too() -> None:
    stalled, busy = measured(), measured()
    stalled.receive_lag.extend([1200 * MS])
    busy.add_usage(10**9, 98 * 10**7)
    assert judge(stalled, 0).reasons == ["a process stood still for 1.2 s"]
    assert judge(busy, 0).reasons == ["its processes used 98% of a core each"]


def seconds(tokens: list[int], ttft_ms: list[float], sent: int = 100) -> list[Second]:
    pairs = enumerate(zip(tokens, ttft_ms, strict=True))
    return [Second(second=number, sent=sent, output_tokens=count, ttft_ms=mean) for number, (count, mean) in pairs]


def test_a_level_whose_queue_grows_is_not_steady() -> None:
    assert steadiness(seconds([100] * 10, [50.0] * 10), 10.4).steady
    growing = steadiness(seconds([100] * 10, [50.0 * n for n in range(1, 11)]), 10.4)
    assert not growing.steady
    assert growing.reasons == ["mean TTFT 150 ms in the first half, 400 ms in the second"]
    warming = steadiness(seconds([10] * 5 + [100] * 5, [50.0] * 10), 10.4)
    assert warming.reasons == ["10 output tokens/s in the first half, 100 in the second"]


def test_few_requests_may_differ_by_chance_and_a_short_window_says_nothing() -> None:
    assert steadiness(seconds([80] * 5 + [100] * 5, [50.0] * 10, sent=4), 10.4).steady
    assert steadiness(seconds([10] * 3 + [100] * 3, [50.0] * 6), 6.5).steady is None


def test_the_confidence_interval_is_students() -> None:
    # 3 samples of standard deviation 1: t of 2 degrees of freedom is 4.303.
    found = interval([9.0, 10.0, 11.0])
    assert (found.mean, found.samples) == (10.0, 3)
    assert found.high - found.mean == pytest.approx(4.303 / 3**0.5)
    assert found.mean - found.low == pytest.approx(4.303 / 3**0.5)


def observed(began_ms: int, ttft_ms: int, ended_ms: int, scheduled_ms: int = 0, failure: Failure | None = None) -> Observation:
    first = (began_ms + ttft_ms) * MS
    return Observation(
        sent_ns=began_ms * MS,
        scheduled_ns=scheduled_ms * MS,
        arrivals=[] if failure else [(first, 1), (ended_ms * MS, 1)],
        ended_ns=ended_ms * MS,
        input_tokens=4,
        cut_off=False,
        failure=failure,
    )


def test_goodput_counts_failures_against_the_service_and_time_from_when_a_request_was_due() -> None:
    slo = Slo(ttft_ms=100, e2e_ms=1000, share=0.5)
    measures, window = Measures(began_unix_ns=1, ended_unix_ns=2 * 10**9), Window(0, 2000 * MS, slo)
    measures.add(observed(100, 50, 300), window)
    measures.add(observed(100, 150, 300), window)  # first token late
    measures.add(observed(100, 50, 1200), window)  # end late
    measures.add(observed(100, 50, 300, scheduled_ms=20), window)  # first token 130 ms after it was due
    measures.add(observed(100, 0, 300, failure=Failure(ErrorClass.QUEUE_FULL, "RESOURCE_EXHAUSTED", "full")), window)
    level = level_of(measures, LOAD, slo, 1)
    assert level.slo is not None
    assert (level.slo.share, level.slo.met, level.requests.good) == (0.2, False, 1)
    assert level.requests.good_per_s == pytest.approx(0.5)
    assert level.requests.completed_per_s == pytest.approx(2.0)
    assert level.scheduled_ttft_ms.p50 == pytest.approx(130, rel=1e-3)
    assert level.schedule_lag_ms.p50 == pytest.approx(80, rel=1e-3)


def test_a_request_cut_off_beyond_a_limit_counts_against_the_service_and_any_that_was_sent_late_against_the_load_generator() -> None:
    measures, window = Measures(began_unix_ns=1, ended_unix_ns=10**9), Window(0, 1000 * MS, Slo(ttft_ms=100, e2e_ms=1000))
    measures.add(Observation(sent_ns=100 * MS, ended_ns=900 * MS), window)  # without a first token
    measures.add(Observation(sent_ns=100 * MS, ended_ns=150 * MS), window)  # it could still have come in time
    measures.add(Observation(sent_ns=100 * MS, ended_ns=900 * MS, arrivals=[(150 * MS, 1)]), window)
    measures.add(Observation(sent_ns=100 * MS, ended_ns=1200 * MS, arrivals=[(150 * MS, 1)]), window)
    assert (measures.cut_off, measures.judged, measures.good) == (4, 2, 0)
    measures.add(Observation(sent_ns=100 * MS, scheduled_ns=20 * MS, ended_ns=150 * MS), window)
    assert measures.schedule_lag.largest == 80 * MS


def test_what_ends_in_the_drain_has_latencies_but_no_part_in_the_rates() -> None:
    slo = Slo(e2e_ms=5000)
    measures, window = Measures(began_unix_ns=1, ended_unix_ns=10**9), Window(1000 * MS, 2000 * MS, slo)
    measures.add(observed(1500, 200, 2500), window)  # its first token in the window, its second after
    measures.add(observed(2100, 200, 2500), window)  # sent after the window
    level = level_of(measures, LOAD, slo, 1)
    assert (level.requests.completed, level.requests.completed_per_s, level.tokens.output, level.requests.good) == (1, 0.0, 1, 1)
    assert (level.e2e_ms.count, level.itl_ms.count) == (1, 1)
    assert level.mean_in_flight == pytest.approx(0.5)
    assert [(second.second, second.sent, second.completed, second.output_tokens) for second in level.seconds] == [(0, 1, 0, 1)]
    ((ttft_ms, share),) = level.cdf["ttft_ms"]
    assert ttft_ms == pytest.approx(200, rel=1e-3)
    assert share == 1


def test_repeats_of_a_level_are_put_together() -> None:
    levels = []
    for repeat, ttft_ms in enumerate((90, 100, 110)):
        measures = Measures(began_unix_ns=1, ended_unix_ns=10**9)
        measures.add(observed(100, ttft_ms, 900), Window())
        levels.append(level_of(measures, Load(number=repeat, arrival="closed", concurrency=2, rate=None, repeat=repeat), Slo(), 1))
    (together,) = repeated(levels)
    assert together.figures["ttft_ms.p50"].mean == pytest.approx(100, rel=1e-3)
    assert "scheduled_ttft_ms.p50" not in together.figures
