"""The charts of a report: distributions, courses over time, throughput against latency, of one target's levels or of several targets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from markupsafe import Markup

from loadgen._report import LATENCIES
from loadgen._result import Level, Result
from loadgen._svg import Axis, Line, axis, chart, percent_axis, steps

Runs = Sequence[tuple[str, Result]]
"""With the name that the report calls each by."""

_DISTINCT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of targets: Okabe and Ito's colours, which colour-blind readers can tell apart."""
_RAMP = ((0x7A, 0xD1, 0x51), (0x22, 0xA8, 0x84), (0x2A, 0x78, 0x8E), (0x41, 0x44, 0x87), (0x44, 0x01, 0x54))
"""Of levels, from the least load to the highest: viridis, without its yellow, from light to dark."""


@dataclass(frozen=True, slots=True)
class Series:
    """Levels that have a colour and a name in the legend together: the repeats of one."""

    name: str
    colour: str
    levels: list[Level]


@dataclass(frozen=True, slots=True)
class Group:
    """Charts that share a legend."""

    title: str
    series: list[Series]
    charts: list[Markup]


def groups(runs: Runs) -> list[Group]:
    """All charts of a report: first what the levels say together, then each on its own; targets side by side where there are several."""
    targets = [Series(name, _DISTINCT[number % len(_DISTINCT)], result.levels) for number, (name, result) in enumerate(runs)]
    found = [Group("Throughput against latency", targets, [_against(name, targets) for name in LATENCIES])]
    if len(runs) == 1:
        by_load = by_loads(runs[0][1].levels)
        ramp = _ramp(len(by_load))
        series = [Series(name, colour, levels) for (name, levels), colour in zip(by_load.items(), ramp, strict=True)]
        return [*found, Group("Latencies and their course", series, _courses(series))]
    names = dict.fromkeys(name for target in targets for name in by_loads(target.levels))
    for name in names:
        series = [Series(target.name, target.colour, levels) for target in targets if (levels := by_loads(target.levels).get(name))]
        found.append(Group(f"Latencies and their course: {name}", series, _courses(series)))
    return found


def by_loads(levels: Iterable[Level]) -> dict[str, list[Level]]:
    """The repeats of each load, from the least load to the highest, by the name of the first of them."""
    loads: dict[tuple[int, float], list[Level]] = {}
    for level in levels:
        loads.setdefault((level.concurrency, level.rate or 0.0), []).append(level)
    return {repeats[0].name: repeats for _, repeats in sorted(loads.items())}


def _courses(series: list[Series]) -> list[Markup]:
    itl = [line for one in series for level in one.levels for line in _itl_lines(one, level)]
    pace = [Line(_pace(level), one.colour, one.name) for one in series for level in one.levels]
    return [
        *(_distribution(name, title, series) for name, title in LATENCIES.items()),
        _over_time("ITL over time", "mean of each second; dashed: the longest gap that ended in it", "ms", itl, wide=True),
        _over_time("Output tokens/s over time", "received in each second", "tokens/s", pace),
    ]


def _distribution(name: str, title: str, series: list[Series]) -> Markup:
    scheduled = f"scheduled_{name}"
    lines = [
        Line(steps(level.cdf[key]), one.colour, one.name, dashed=key == scheduled)
        for one in series
        for level in one.levels
        for key in (name, scheduled)
        if key in level.cdf
    ]
    note = "dashed: from when the request was due" if any(line.dashed for line in lines) else ""
    return chart(f"{title}: share of samples at most so long", note, _fitted("ms", lines, 0, wide=True), _PERCENT, lines)


_PERCENT = percent_axis("share of samples")


def _itl_lines(one: Series, level: Level) -> list[Line]:
    seconds = [second for second in level.seconds if second.second < int(level.duration_s)]
    means = [(second.second, second.itl_ms) for second in seconds if second.itl_ms is not None]
    longest = [(second.second, second.itl_max_ms) for second in seconds if second.itl_max_ms is not None]
    return [Line(means, one.colour, one.name), Line(longest, one.colour, f"{one.name}, longest", dashed=True)]


def _pace(level: Level) -> list[tuple[float, float]]:
    """Of whole seconds, also those in which nothing came."""
    tokens = {second.second: second.output_tokens for second in level.seconds}
    return [(second, tokens.get(second, 0)) for second in range(int(level.duration_s))]


def _over_time(title: str, note: str, unit: str, lines: list[Line], wide: bool = False) -> Markup:
    return chart(title, note, _fitted("seconds since the window opened", lines, 0), _fitted(unit, lines, 1, wide), lines)


def _against(name: str, targets: list[Series]) -> Markup:
    """Each dot a load, the mean of its repeats; numbers are the concurrency, or the rate."""
    lines = []
    for target in targets:
        for figure in ("p50", "p99"):
            points, marks = [], []
            for levels in by_loads(target.levels).values():
                values = [value for level in levels if (value := getattr(getattr(level, name), figure)) is not None]
                if values:
                    points.append((mean(level.tokens.output_per_s for level in levels), mean(values)))
                    marks.append(f"{levels[0].rate or levels[0].concurrency:g}")
            dashed = figure == "p99"
            lines.append(Line(points, target.colour, f"{target.name}, {figure}", dashed, dots=True, marks=() if dashed else marks))
    note = "p50; dashed: p99; numbers: concurrency or rate"
    x, y = _fitted("output tokens/s", lines, 0), _fitted("ms", lines, 1, wide=True)
    return chart(f"{LATENCIES[name]} against output tokens/s", note, x, y, lines)


def _fitted(label: str, lines: list[Line], coordinate: int, wide: bool = False) -> Axis:
    return axis(label, (point[coordinate] for line in lines for point in line.points), wide=wide)


def _ramp(count: int) -> list[str]:
    if count == 1:
        return [_DISTINCT[0]]
    colours = []
    for number in range(count):
        place = number / (count - 1) * (len(_RAMP) - 1)
        first = min(int(place), len(_RAMP) - 2)
        mixed = (round(low + (high - low) * (place - first)) for low, high in zip(_RAMP[first], _RAMP[first + 1], strict=True))
        colours.append("#" + "".join(f"{part:02x}" for part in mixed))
    return colours
