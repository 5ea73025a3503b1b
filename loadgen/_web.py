"""Tabs of Locust's web UI with what Locust itself does not measure: latencies and tokens of the level that runs, and all levels."""

from __future__ import annotations

import json
from typing import Any

from flask import Response, request
from locust.web import WebUI

from loadgen._collector import Collector
from loadgen._report import FIGURES, measures_of
from loadgen._result import Level, Spread

_TOKENS, _LEVELS = "tokens", "levels"
_TOKENS_FIELDS = ("name", *FIGURES.values(), "count")
_LEVELS_FIELDS = (
    *("level", "state", "requests/s", "output tokens/s", "TTFT p50 (ms)", "TTFT p99 (ms)", "TPOT p50 (ms)", "TPOT p99 (ms)"),
    *("E2E p50 (ms)", "E2E p99 (ms)", "failed", "SLO", "trusted"),
)


def add_tabs(web_ui: WebUI, collector: Collector) -> None:
    """Locust's pages ask for /stats/requests every two seconds and show `extended_stats` of its answer in the tabs."""
    web_ui.template_args["extended_tabs"] = [{"title": "Tokens", "key": _TOKENS}, {"title": "Levels", "key": _LEVELS}]
    web_ui.template_args["extended_tables"] = [_table(_TOKENS, _TOKENS_FIELDS), _table(_LEVELS, _LEVELS_FIELDS)]

    def extend(response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json:
            levels = collector.progress
            tables = [
                {"key": _TOKENS, "data": _token_rows(levels[-1][1]) if levels else []},
                {"key": _LEVELS, "data": [_level_row(state, level) for state, level in levels]},
            ]
            response.set_data(json.dumps({**response.get_json(), "extended_stats": tables}))
        return response

    assert web_ui.app is not None
    web_ui.app.after_request(extend)


def _table(key: str, fields: tuple[str, ...]) -> dict[str, Any]:
    return {"key": key, "structure": [{"key": field, "title": field} for field in fields]}


def _token_rows(level: Level) -> list[dict[str, Any]]:
    rows = [{"name": title if title.endswith("/s") else f"{title} (ms)", **_spread(spread)} for title, spread in measures_of(level).items()]
    rows.append({"name": "Output tokens/s", "mean": _shown(level.tokens.output_per_s), "count": level.tokens.output})
    rows.append({"name": "Input tokens/s", "mean": _shown(level.tokens.input_per_s), "count": level.tokens.input})
    return rows


def _level_row(state: str, level: Level) -> dict[str, Any]:
    figures = (level.requests.completed_per_s, level.tokens.output_per_s)
    latencies = (getattr(spread, name) for spread in (level.ttft_ms, level.tpot_ms, level.e2e_ms) for name in ("p50", "p99"))
    slo = "" if level.slo is None else "met" if level.slo.met else "missed"
    trusted = "yes" if level.verdict.trusted else "; ".join(level.verdict.reasons)
    values = (level.name, state, *map(_shown, (*figures, *latencies)), level.requests.failed, slo, trusted)
    return dict(zip(_LEVELS_FIELDS, values, strict=True))


def _spread(spread: Spread) -> dict[str, Any]:
    return {"count": spread.count, **{title: _shown(getattr(spread, name)) for name, title in FIGURES.items()}}


def _shown(value: float | int | None) -> float | int | str:
    return "" if value is None else round(value, 2)
