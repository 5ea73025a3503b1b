"""The page of a comparison, which needs nothing else: no network, no script. Its pictures are the ratios with their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from baselines.estimates import Estimate
from baselines.summary import FIGURES, Summary

_TEMPLATE = "report.html"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which colour-blind readers can tell apart."""
_WIDTH, _LEFT, _RIGHT, _TOP, _LINE = 620, 240, 20, 34, 24
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.25, 2, 5, 10, 20, 50, 100)


def page(summary: Summary, lines: Sequence[Sequence[str]], intervals: str) -> str:
    """`lines` are the table's, its header first. Every text is escaped."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    charts = [chart for figure in FIGURES if not figure.per_start and (chart := ratio_chart(summary, figure.title))]
    return environment.get_template(_TEMPLATE).render(summary=summary, header=lines[0], lines=lines[1:], charts=charts, intervals=intervals)


def ratio_chart(summary: Summary, figure: str) -> Markup:
    """A dot for each cell's ratio of one figure, with its interval as a bar, on a logarithmic axis around 1; "" where there is none."""
    dots = [
        (f"{cell.name} @ {cell.concurrency}", name, estimates[figure])
        for cell in summary.cells
        for name, estimates in cell.ratios.items()
        if figure in estimates
    ]
    if not dots:
        return Markup("")
    ends = [end for _, _, estimate in dots for end in (estimate.low or estimate.value, estimate.high or estimate.value)]
    # An interval of two repeats may span the world: the axis shows the ratios, and what bars fit.
    values = [estimate.value for _, _, estimate in dots]
    low, high = max(min(*ends, 0.8), min(*values, 0.8) / 2), min(max(*ends, 1.25), max(*values, 1.25) * 2)
    height, names = _TOP + _LINE * len(dots) + 26, list(dict.fromkeys(name for _, name, _ in dots))

    def across(ratio: float) -> float:
        share = (math.log(min(max(ratio, low), high)) - math.log(low)) / (math.log(high) - math.log(low))
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    parts = [
        Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(_WIDTH, height, f"Ratios of {figure}"),
        Markup('<text class="title" x="{}" y="18">{}</text>').format(_LEFT, figure),
        *(_tick(across(tick), tick, height) for tick in _TICKS if low <= tick <= high),
        *(
            _dot(number, cell, name, estimate, across, _COLOURS[names.index(name) % len(_COLOURS)])
            for number, (cell, name, estimate) in enumerate(dots)
        ),
    ]
    return Markup("").join([*parts, Markup("</svg>")])


def _tick(at: float, ratio: float, height: int) -> Markup:
    return Markup('<path class="{}" d="M{} {}V{}"/><text text-anchor="middle" x="{}" y="{}">{}</text>').format(
        "one" if ratio == 1 else "grid", at, _TOP - 8, height - 22, at, height - 6, f"{ratio:g}"
    )


def _dot(number: int, cell: str, name: str, estimate: Estimate, across: Callable[[float], float], colour: str) -> Markup:
    down = _TOP + _LINE * number + 8
    above, _, below = name.partition(" / ")
    label = "again" if above == f"{below} again" else f"/ {below}"
    drawn = Markup('<text text-anchor="end" x="{}" y="{}">{}</text>').format(_LEFT - 10, down + 4, f"{cell}  {label}")
    says = f"{name}, {cell}: {estimate.value:.3f}"
    if estimate.low is not None and estimate.high is not None:
        says += f" ({estimate.low:.3f} to {estimate.high:.3f}, n = {estimate.samples})"
        drawn += Markup('<path class="bar" stroke="{}" d="M{} {}H{}"/>').format(colour, across(estimate.low), down, across(estimate.high))
    return drawn + Markup('<circle cx="{}" cy="{}" r="4" fill="{}"><title>{}</title></circle>').format(
        across(estimate.value), down, colour, says
    )
