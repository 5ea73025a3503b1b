"""The rules of TTFT, ITL, TPOT and of what counts, on observations written by hand."""

from __future__ import annotations

import msgspec

from loadgen._measures import Measures, Window
from loadgen._target import ErrorClass, Failure, Observation

FULL = Failure(ErrorClass.QUEUE_FULL, "RESOURCE_EXHAUSTED", "queue full")


def observation(arrivals: list[tuple[int, int]], failure: Failure | None = None, cut_off: bool = False) -> Observation:
    """Sent at 1000, ended at 2000."""
    return Observation(sent_ns=1000, arrivals=arrivals, ended_ns=2000, input_tokens=7, cached_tokens=2, failure=failure, cut_off=cut_off)


def measured(*observations: Observation, since_ns: int = 0) -> Measures:
    measures = Measures()
    for one in observations:
        measures.add(one, Window(since_ns))
    return measures


def values(measures: Measures) -> dict[str, list[int]]:
    """Below 2048 a bucket is a value."""
    histograms = {"ttft": measures.ttft, "itl": measures.itl, "tpot": measures.tpot, "e2e": measures.e2e}
    return {name: sorted(v for v, n in histogram.buckets.items() for _ in range(n)) for name, histogram in histograms.items()}


def test_one_token_a_message() -> None:
    measures = measured(observation([(1100, 1), (1110, 1), (1140, 1)]))
    assert values(measures) == {"ttft": [100], "itl": [10, 30], "tpot": [20], "e2e": [1000]}
    assert (measures.completed, measures.input_tokens, measures.cached_tokens, measures.output_tokens) == (1, 7, 2, 3)


def test_a_gap_before_several_tokens_is_one_sample_and_tpot_shares_it_among_them() -> None:
    measures = measured(observation([(1100, 2), (1190, 4), (1200, 1)]))
    assert values(measures) == {"ttft": [100], "itl": [10, 90], "tpot": [100 // 6], "e2e": [1000]}


def test_an_answer_in_one_message_has_no_pace() -> None:
    for tokens in (1, 5):
        assert values(measured(observation([(1100, tokens)]))) == {"ttft": [100], "itl": [], "tpot": [], "e2e": [1000]}


def test_a_failed_request_has_no_latencies_but_its_tokens_were_received() -> None:
    measures = measured(observation([(1100, 3)], failure=FULL), observation([], failure=FULL))
    assert values(measures) == {"ttft": [], "itl": [], "tpot": [], "e2e": []}
    assert (measures.completed, measures.failed, measures.output_tokens) == (0, 2, 3)
    assert measures.errors[ErrorClass.QUEUE_FULL].example == "RESOURCE_EXHAUSTED: queue full"


def test_a_request_cut_off_is_neither_completed_nor_failed() -> None:
    measures = measured(observation([(1100, 3), (1200, 1)], cut_off=True))
    assert (measures.completed, measures.failed, measures.cut_off, measures.output_tokens) == (0, 0, 1, 4)
    assert not measures.e2e.count


def test_what_came_before_the_window_opened_is_left_out() -> None:
    measures = measured(observation([(1100, 3), (1200, 1), (1300, 1)]), since_ns=1200)
    assert (measures.input_tokens, measures.output_tokens, measures.in_flight_ns) == (0, 2, 800)


def test_merged_measures_are_those_of_one_process() -> None:
    parts = [observation([(1100, 1), (1110, 2)]), observation([], failure=FULL), observation([(1300, 1)], cut_off=True)]
    merged = Measures()
    for part in parts:
        merged.merge(msgspec.msgpack.decode(msgspec.msgpack.encode(measured(part)), type=Measures))
    assert merged == measured(*parts)


def test_the_merged_window_spans_those_of_all_processes() -> None:
    merged = Measures()
    for began, ended in ((0, 0), (20, 40), (10, 30)):
        merged.merge(Measures(began_unix_ns=began * 10**9, ended_unix_ns=ended * 10**9))
    assert merged.duration_s == 30.0


def test_a_request_sent_before_the_window_opened_has_no_latencies() -> None:
    measures = measured(observation([(1100, 1), (1110, 1)]), since_ns=1050)
    assert (measures.completed, measures.output_tokens) == (1, 2)
    assert values(measures) == {"ttft": [], "itl": [], "tpot": [], "e2e": []}


def test_what_processes_use_is_summed_and_the_busiest_kept() -> None:
    merged = Measures()
    for wall_ns, cpu_ns, lag_ns in ((10**9, 4 * 10**8, 5), (10**9, 9 * 10**8, 7), (10**6, 10**6, 9)):
        part = Measures()
        part.add_usage(wall_ns, cpu_ns)
        part.receive_lag.add(lag_ns)
        merged.merge(part)
    assert (merged.wall_ns, merged.cpu_ns) == (2 * 10**9 + 10**6, 13 * 10**8 + 10**6)
    # Not the last, which was too short to tell.
    assert merged.busiest_cpu == 0.9
    assert merged.receive_lag.percentile(50) == 7
