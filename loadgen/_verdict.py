"""Whether a level's figures are the server's, or the load generator's own; and whether the level held still."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from loadgen._measures import Measures
from loadgen._result import Result, Second, Steady, Verdict

BREACHED = 3
UNTRUSTED = 4

MOST_LAG_MS = 20.0
"""At p99, of reading and of sending."""
MOST_STALL_MS = 1000.0
MOST_CPU = 0.95
"""Of a core, on average: the loop that reads is one thread."""
_LEAST_SECONDS = 8
"""A shorter window has no halves to compare."""
_DRIFT = 0.1
_TTFT_DRIFT = 0.5
_CHANCE = 3.0
"""Standard deviations that two halves may lie apart by chance."""


def judge(measures: Measures, lost: int) -> Verdict:
    """The verdict on a level; `lost` processes did not make their last report."""
    reasons = []
    if not measures.began_unix_ns:
        reasons.append("nothing was measured: the run ended before the window opened")
    elif measures.cut_off and not (measures.completed or measures.failed):
        reasons.append("nothing was measured: no request ended before it was cut off")
    if lost:
        reasons.append(f"{lost} of its processes did not report to the end")
    if (lag_ms := measures.receive_lag.percentile(99) / 1e6) > MOST_LAG_MS:
        reasons.append(f"messages were read {lag_ms:.0f} ms late at p99, more than {MOST_LAG_MS:.0f}")
    elif (stall_ms := measures.receive_lag.largest / 1e6) > MOST_STALL_MS:
        reasons.append(f"a process stood still for {stall_ms / 1000:.1f} s")
    if (lag_ms := measures.schedule_lag.percentile(99) / 1e6) > MOST_LAG_MS:
        reasons.append(f"requests were sent {lag_ms:.0f} ms after they were due at p99, more than {MOST_LAG_MS:.0f}")
    if measures.cpu_ns > MOST_CPU * measures.wall_ns:
        reasons.append(f"its processes used {measures.cpu_ns / measures.wall_ns:.0%} of a core each")
    return Verdict(trusted=not reasons, reasons=reasons)


def judge_all(levels: Sequence[tuple[str, Verdict]]) -> Verdict:
    """The run's, from (name, verdict) of its levels."""
    if not levels:
        return Verdict(trusted=False, reasons=["nothing was measured: the run ended before a window opened"])
    reasons = [f"{name}: {reason}" if len(levels) > 1 else reason for name, verdict in levels for reason in verdict.reasons]
    return Verdict(trusted=not reasons, reasons=reasons)


def steadiness(seconds: Sequence[Second], duration_s: float) -> Steady:
    """Compare the window's halves, without the second in which it ended."""
    whole = int(duration_s)
    if whole < _LEAST_SECONDS:
        return Steady(steady=None)
    half = whole // 2
    first = [second for second in seconds if second.second < half]
    last = [second for second in seconds if half <= second.second < 2 * half]
    reasons = []
    pace = (sum(s.output_tokens for s in first) / half, sum(s.output_tokens for s in last) / half)
    requests = min(sum(s.sent for s in first), sum(s.sent for s in last))
    if abs(pace[1] - pace[0]) > max(_DRIFT, _CHANCE / sqrt(max(1, requests))) * max(pace):
        reasons.append(f"{pace[0]:.0f} output tokens/s in the first half, {pace[1]:.0f} in the second")
    ttft_ms = _mean_ttft(first), _mean_ttft(last)
    if ttft_ms[0] is None or ttft_ms[1] is None:
        return Steady(steady=not reasons, output_tokens_per_s=pace, reasons=reasons)
    if ttft_ms[1] > (1 + max(_TTFT_DRIFT, _CHANCE / sqrt(max(1, requests)))) * ttft_ms[0]:
        reasons.append(f"mean TTFT {ttft_ms[0]:.0f} ms in the first half, {ttft_ms[1]:.0f} ms in the second")
    return Steady(steady=not reasons, output_tokens_per_s=pace, ttft_ms=(ttft_ms[0], ttft_ms[1]), reasons=reasons)


def _mean_ttft(seconds: Sequence[Second]) -> float | None:
    means = [second.ttft_ms for second in seconds if second.ttft_ms is not None]
    return sum(means) / len(means) if means else None


def exit_status(result: Result, failures: int) -> int:
    """Of the process: `failures` where requests failed, else 4 for a run not to be trusted, 3 for a breach of the SLO, 0 for neither.

    A search is to breach it; what counts is whether it found a load that does not.
    """
    if any(level.requests.failed for level in result.levels):
        return failures
    if not result.verdict.trusted:
        return UNTRUSTED
    breached = result.search.best is None if result.search else any(level.slo and not level.slo.met for level in result.levels)
    return BREACHED if breached else 0
