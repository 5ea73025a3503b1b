"""Line charts as SVG that stands in a page by itself: no script, no font and no file of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 46, 46
_MOST_TICKS = 10
_WIDE = 20
"""Values that lie further apart than this, as a ratio, are read better on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    points: Sequence[tuple[float, float]]
    colour: str
    name: str
    """Shown where a reader points at it."""
    dashed: bool = False
    dots: bool = False
    """Its points are shown."""
    marks: Sequence[str] = ()
    """What to write below the points."""


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, with ticks at round values."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """0 at the axis's beginning, 1 at its end."""
        if self.logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(label: str, values: Iterable[float], *, wide: bool = False) -> Axis:
    """From 0 to just above the largest value; logarithmic around all positive ones if `wide` allows it and they lie far apart."""
    positive = [value for value in values if value > 0] or [1.0]
    least, largest = min(positive), max(positive)
    if wide and largest > _WIDE * least:
        return _logarithmic(label, least, largest)
    rough = largest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    count = math.ceil(largest / step - 1e-9)
    return Axis(label, 0.0, count * step, tuple(number * step for number in range(count + 1)))


def percent_axis(label: str) -> Axis:
    """Of shares."""
    return Axis(label, 0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0))


def chart(title: str, note: str, x: Axis, y: Axis, lines: Sequence[Line]) -> Markup:
    """`note` says below the title what the dashes mean. What an axis does not hold is cut off."""
    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(_WIDTH, _HEIGHT, title),
        Markup('<text class="title" x="{}" y="18">{}</text><text x="{}" y="35">{}</text>').format(_LEFT, title, _LEFT, note),
        *(_x_tick(x, value) for value in x.ticks),
        *(_y_tick(y, value) for value in y.ticks),
        Markup('<text text-anchor="middle" x="{}" y="{}">{}</text>').format((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 6, x.label),
        Markup('<text text-anchor="middle" transform="translate(14,{}) rotate(-90)">{}</text>').format(
            (_TOP + _HEIGHT - _BOTTOM) / 2, y.label
        ),
        *(_drawn(x, y, line) for line in lines),
    ]
    if not any(line.points for line in lines):
        parts.append(Markup('<text text-anchor="middle" x="{}" y="{}">nothing measured</text>').format(_WIDTH / 2, _HEIGHT / 2))
    return Markup("").join([*parts, Markup("</svg>")])


def steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A distribution function's corners, from 0 up, of its points."""
    corners, height = [], 0.0
    for at, share in points:
        corners += [(at, height), (at, share)]
        height = share
    return corners


def _logarithmic(label: str, least: float, largest: float) -> Axis:
    powers = range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(largest)) + 1)
    rounds = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    low = max(value for value in rounds if value <= least)
    high = min(value for value in rounds if value >= largest)
    ticks = [value for value in rounds if low <= value <= high]
    if len(ticks) > _MOST_TICKS:
        ticks = [10.0**power for power in powers if low <= 10.0**power <= high]
    return Axis(label, low, high, tuple(ticks), logarithmic=True)


def _across(x: Axis, value: float) -> float:
    return round(_LEFT + x.place(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _down(y: Axis, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - y.place(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _x_tick(x: Axis, value: float) -> Markup:
    at, bottom = _across(x, value), _HEIGHT - _BOTTOM
    return Markup('<path class="grid" d="M{0} {1}V{2}"/><text text-anchor="middle" x="{0}" y="{3}">{4}</text>').format(
        at, _TOP, bottom, bottom + 17, _written(value)
    )


def _y_tick(y: Axis, value: float) -> Markup:
    at = _down(y, value)
    return Markup('<path class="grid" d="M{0} {1}H{2}"/><text text-anchor="end" x="{3}" y="{4}">{5}</text>').format(
        _LEFT, at, _WIDTH - _RIGHT, _LEFT - 6, at + 4, _written(value)
    )


def _drawn(x: Axis, y: Axis, line: Line) -> Markup:
    places = [(_across(x, at), _down(y, value)) for at, value in line.points]
    if not places:
        return Markup("")
    path = "M" + "L".join(f"{across} {down}" for across, down in places)
    dash = Markup(' stroke-dasharray="5 4"') if line.dashed else ""
    drawn = Markup('<path class="line" stroke="{}" d="{}"{}><title>{}</title></path>').format(line.colour, path, dash, line.name)
    for across, down in places if line.dots else ():
        dot = Markup('<circle cx="{}" cy="{}" r="3.5" fill="{}"><title>{}</title></circle>')
        drawn += dot.format(across, down, line.colour, line.name)
    for (across, down), mark in zip(places, line.marks, strict=False):
        drawn += Markup('<text text-anchor="middle" x="{}" y="{}">{}</text>').format(across, down + 16, mark)
    return drawn


def _written(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"
