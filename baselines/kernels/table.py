"""Results as Markdown: a table an operator, backend beside backend, and below it why a time is missing."""

from __future__ import annotations

from collections.abc import Sequence

from baselines.kernels.record import Machine, Result

MISSING = "n/a"


def tables(machine: Machine | None, results: Sequence[Result]) -> str:
    """All operators, in the order in which they were run."""
    operators = list(dict.fromkeys(result.operator for result in results))
    parts = [_head(machine)] if machine else []
    parts += [_operator(name, [result for result in results if result.operator == name]) for name in operators]
    return "\n\n".join(parts) + "\n"


def _head(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (machine.versions | machine.peers).items())
    if machine.bandwidth is None:
        limit = f"nothing is known of its limits, so that no share of them is stated ({MISSING})"
    else:
        tflops = ", ".join(f"{value:.0f} TFLOP/s in {name}" for name, value in machine.tflops.items())
        limit = f"limits: {machine.bandwidth} TB/s as measured ({machine.peak_bandwidth} stated), {tflops} stated"
    return f"{machine.device} ({machine.architecture}), {machine.dtype}: {machine.model}. {versions}. {limit[0].upper()}{limit[1:]}."


def _operator(name: str, results: Sequence[Result]) -> str:
    cases = list(dict.fromkeys(result.case for result in results if result.case))
    backends = list(dict.fromkeys(result.backend for result in results if result.us is not None))
    measured = {(result.case, result.backend): result for result in results if result.us is not None}
    lines = [f"**{name}**, us"]
    if backends:
        lines += ["", _row("case", *backends, "of the best: TB/s", "TFLOP/s", "share of the limit"), "|" + " --- |" * (len(backends) + 4)]
        lines += [_case(case, [measured.get((case, backend)) for backend in backends]) for case in cases]
    reasons = _reasons(results)
    if reasons:
        lines += ["", *reasons]
    return "\n".join(lines)


def _case(case: str, row: Sequence[Result | None]) -> str:
    best = min((result for result in row if result), key=lambda result: result.us or 0.0, default=None)
    cells = [_time(result, result is best) for result in row]
    if best is None:
        return _row(case, *cells, MISSING, MISSING, MISSING)
    share = MISSING if best.share is None else f"{100 * best.share:.0f} % of {best.bound}"
    return _row(case, *cells, _number(best.tbs, 2), _number(best.tflops, 1), share)


def _time(result: Result | None, best: bool) -> str:
    if result is None or result.us is None:
        return MISSING
    text = f"{result.us:.1f}{'*' if result.timed == 'stream' else ''}"
    return f"**{text}**" if best else text


def _number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _reasons(results: Sequence[Result]) -> list[str]:
    """A line a reason, with the cases that it holds for; then the notes."""
    cases: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if result.us is None:
            cases.setdefault((result.backend, result.status, result.reason), []).append(result.case)
    lines = [
        f"- {backend}{f' ({_some(names)})' if any(names) else ''}: {MISSING}, {status}: {reason}"
        for (backend, status, reason), names in cases.items()
    ]
    notes = dict.fromkeys((result.backend, result.note) for result in results if result.note and result.us is not None)
    lines += [f"- {backend}: {note}" for backend, note in notes]
    if any(result.timed == "stream" for result in results):
        lines.append("- *: one launch by itself, since no CUDA graph holds it")
    return lines


def _some(names: Sequence[str], most: int = 3) -> str:
    shown = "; ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
