"""A picture an operator: backend against backend, over batch and context. Needs matplotlib (the extra `baselines`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baselines.kernels.record import Machine, Result

X = ("tokens", "rows", "decodes", "batch")
"""The size on the horizontal axis: the first that there is."""
WIDTH, HEIGHT, COLUMNS = 4.2, 3.4, 4
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f3c8d", "#4d4d4d", "#a6761d", "#1b9e77", "#e7298a")
MARKERS = "osv^D<>Pp*X"
LIMIT = "limit"
BELOW = 3.0
"""How far below the best time an axis reaches; where the limit is further off, it is not shown."""


def draw_all(machine: Machine | None, results: Sequence[Result], folder: Path) -> list[Path]:
    """kernels-OPERATOR.png of each operator that was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for operator in dict.fromkeys(result.operator for result in results):
        measured = [result for result in results if result.operator == operator and result.us is not None]
        if measured:
            path = folder / f"kernels-{operator.replace('_', '-')}.png"
            _draw(operator, machine, measured, path)
            drawn.append(path)
    return drawn


def _draw(operator: str, machine: Machine | None, results: Sequence[Result], path: Path) -> None:
    from matplotlib.figure import Figure

    panels: dict[str, list[Result]] = {}
    for result in results:
        panels.setdefault(_panel(result), []).append(result)
    backends = list(dict.fromkeys(result.backend for result in results))
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows + 1.1), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, points) in zip(axes, panels.items(), strict=False):
        _panel_of(axis, title, points, backends)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    names = [name for name in (*backends, LIMIT) if name in handles]
    shown = [handles[name] for name in names]
    figure.legend(shown, names, loc="outside lower center", ncols=min(len(names), 3 * columns), frameon=False, fontsize=9)
    where = f" ({machine.device}, {machine.dtype})" if machine else ""
    figure.suptitle(f"{operator}{where}: less is better", fontsize=11)
    figure.savefig(path, dpi=110)


def _x(result: Result) -> str:
    return next(name for name in X if name in result.sizes)


def _panel(result: Result) -> str:
    """What is the same in one panel: all but the horizontal axis."""
    others = ", ".join(f"{name} {size}" for name, size in result.sizes.items() if name != _x(result))
    return f"{result.kind}{', ' if others else ''}{others}"


def _panel_of(axis: Any, title: str, points: Sequence[Result], backends: Sequence[str]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    for index, backend in enumerate(backends):
        line = sorted((point.sizes[_x(point)], point.us) for point in points if point.backend == backend)
        if line:
            look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 4, "linewidth": 1.3}
            axis.plot(*zip(*line, strict=True), label=backend, **look)
    bounds = sorted({(point.sizes[_x(point)], round(point.us * point.share, 4)) for point in points if point.us and point.share})
    if bounds:
        # Each backend gives the same bound, but for rounding.
        axis.plot(*zip(*dict(bounds).items(), strict=True), label=LIMIT, color="black", linestyle=":", linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_ylim(bottom=min(point.us or 0.0 for point in points) / BELOW)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    sizes = sorted({point.sizes[_x(point)] for point in points})
    axis.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axis.set_xticks([], minor=True)
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title(title, fontsize=9)
    axis.set_xlabel(_x(points[0]), fontsize=9)
    axis.set_ylabel("us", fontsize=9)
    axis.grid(visible=True, which="both", alpha=0.25, linewidth=0.5)
