"""From sums to figures: what a level's merged measures say, and what a run's levels say together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev

from inference_service.loadtest import Slo as Limits
from loadgen import _measures
from loadgen._histogram import Histogram
from loadgen._levels import Load
from loadgen._measures import Measures
from loadgen._result import Cdf, Client, ClientCpu, Interval, Level, Repeated, Requests, Search, Second, Slo, Spread, Tokens
from loadgen._verdict import judge, steadiness

_CDF_POINTS = 200
_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Student's t, two-sided 95 %, for 1 to 19 degrees of freedom."""
_T_95_MORE = 2.09
REPEATED = (
    *("requests.completed_per_s", "requests.good_per_s", "tokens.output_per_s", "mean_in_flight"),
    *(f"{name}.{figure}" for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "scheduled_ttft_ms") for figure in ("mean", "p50", "p99")),
)


def level_of(measures: Measures, load: Load, limits: Limits, processes: int, lost: int = 0) -> Level:
    """The figures of one level; `lost` of its processes did not make their last report."""
    window_s = measures.duration_s
    seconds = [_second(number, sums) for number, sums in sorted(measures.seconds.items())]
    spreads = {
        name: getattr(measures, name)
        for name in ("ttft", "tpot", "itl", "e2e", "scheduled_ttft", "scheduled_e2e", "schedule_lag", "queue", "server_ttft", "receive_lag")
    }

    def per_s(count: float) -> float:
        return count / window_s if window_s else 0.0

    return Level(
        name=load.name,
        concurrency=load.concurrency,
        rate=load.rate,
        repeat=load.repeat,
        began_unix_ns=measures.began_unix_ns,
        duration_s=window_s,
        mean_in_flight=per_s(measures.in_flight_ns / 1e9),
        requests=Requests(
            completed=measures.completed,
            failed=measures.failed,
            cut_off=measures.cut_off,
            good=measures.good,
            completed_per_s=per_s(measures.completed_inside),
            good_per_s=per_s(measures.good_inside),
        ),
        errors={kind.value: errors for kind, errors in measures.errors.items()},
        tokens=Tokens(
            input=measures.input_tokens,
            cached=measures.cached_tokens,
            output=measures.output_tokens,
            input_per_s=per_s(measures.input_tokens),
            output_per_s=per_s(measures.output_tokens),
        ),
        **{f"{name}_ms": _spread(histogram, 1e6) for name, histogram in spreads.items()},
        user_tokens_per_s=_spread(measures.user_pace, 1e3),
        client=Client(processes=processes, streams=measures.streams, messages_per_s=per_s(measures.messages)),
        client_cpu=ClientCpu(mean=measures.cpu_ns / measures.wall_ns if measures.wall_ns else None, busiest=measures.busiest_cpu),
        slo=_slo(measures, limits),
        steady=steadiness(seconds, window_s),
        verdict=judge(measures, lost),
        seconds=seconds,
        cdf={f"{name}_ms": _cdf(histogram) for name, histogram in spreads.items() if histogram.count},
    )


def repeated(levels: Sequence[Level]) -> list[Repeated]:
    """Means and confidence intervals of what ran more than once."""
    groups: defaultdict[tuple[int, float | None], list[Level]] = defaultdict(list)
    for level in levels:
        groups[level.concurrency, level.rate].append(level)
    return [
        Repeated(concurrency=concurrency, rate=rate, figures=_intervals(group))
        for (concurrency, rate), group in groups.items()
        if len(group) > 1
    ]


def found(levels: Sequence[Level]) -> Search:
    """The highest load all of whose repeats met the SLO."""
    met: dict[float, bool] = {}
    for level in levels:
        load = level.concurrency if level.rate is None else level.rate
        met[load] = met.get(load, True) and level.slo is not None and level.slo.met
    return Search(best=max((load for load, good in met.items() if good), default=None))


def t_95(freedom: int) -> float:
    """Student's t, two-sided 95 %, for at least 1 degree of freedom; beyond the table a little too large."""
    return _T_95[freedom - 1] if freedom <= len(_T_95) else _T_95_MORE


def interval(samples: Sequence[float]) -> Interval:
    """The 95 % confidence interval of the mean of at least two samples."""
    middle, half = mean(samples), t_95(len(samples) - 1) * stdev(samples) / sqrt(len(samples))
    return Interval(mean=middle, low=middle - half, high=middle + half, samples=len(samples))


def _intervals(levels: Sequence[Level]) -> dict[str, Interval]:
    samples = {path: [value for level in levels if (value := _at(level, path)) is not None] for path in REPEATED}
    return {path: interval(values) for path, values in samples.items() if len(values) > 1}


def _at(level: Level, path: str) -> float | None:
    value = level
    for name in path.split("."):
        value = getattr(value, name)
    return value  # type: ignore[return-value]


def _slo(measures: Measures, limits: Limits) -> Slo | None:
    if not limits.is_set:
        return None
    share = measures.good / measures.judged if measures.judged else None
    return Slo(share=share, met=share is not None and share >= limits.share)


def _spread(histogram: Histogram, unit: float) -> Spread:
    """`unit` is how many of the histogram's make one of the result's."""
    if not histogram.count:
        return Spread()
    p50, p90, p95, p99, p99_9 = (histogram.percentile(at) / unit for at in (50, 90, 95, 99, 99.9))
    return Spread(
        count=histogram.count,
        mean=histogram.mean / unit,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        p99_9=p99_9,
        max=histogram.largest / unit,
    )


def _cdf(histogram: Histogram) -> Cdf:
    """Not every bucket, which may be thousands, but the steps at which the share grows by half a percent, and the last."""
    points: Cdf = []
    for value, seen in histogram.cumulative():
        share = seen / histogram.count
        if not points or share - points[-1][1] >= 1 / _CDF_POINTS or seen == histogram.count:
            points.append((value / 1e6, share))
    return points


def _second(number: int, sums: _measures.Second) -> Second:
    return Second(
        second=number,
        sent=sums.sent,
        completed=sums.completed,
        failed=sums.failed,
        output_tokens=sums.output_tokens,
        ttft_ms=sums.ttft_ns / sums.ttft_count / 1e6 if sums.ttft_count else None,
        itl_ms=sums.itl_ns / sums.itl_count / 1e6 if sums.itl_count else None,
        itl_max_ms=sums.itl_max_ns / 1e6 if sums.itl_count else None,
    )
