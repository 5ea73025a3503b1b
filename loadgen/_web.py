"""A tab of Locust's web UI with what Locust itself does not measure: TTFT, TPOT, ITL and tokens per second of the run so far."""

from __future__ import annotations

import json
from typing import Any

from flask import Response, request
from locust.web import WebUI

from loadgen._collector import Collector
from loadgen._report import LATENCIES, PERCENTILES

_KEY = "tokens"
_FIELDS = ("name", "mean", *(f"p{percent}" for percent in PERCENTILES), "max", "count")


def add_tab(web_ui: WebUI, collector: Collector) -> None:
    """Locust's pages ask for /stats/requests every two seconds and show `extended_stats` of its answer in the tab."""
    web_ui.template_args["extended_tabs"] = [{"title": "Tokens", "key": _KEY}]
    web_ui.template_args["extended_tables"] = [{"key": _KEY, "structure": [{"key": field, "title": field} for field in _FIELDS]}]

    def extend(response: Response) -> Response:
        if request.path.endswith("/stats/requests") and response.is_json:
            stats = {"extended_stats": [{"key": _KEY, "data": _rows(collector.summary)}]}
            response.set_data(json.dumps({**response.get_json(), **stats}))
        return response

    assert web_ui.app is not None
    web_ui.app.after_request(extend)


def _rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [{"name": f"{title} (ms)", **{key: _shown(value) for key, value in summary[name].items()}} for name, title in LATENCIES.items()]
    rows.append({"name": "Output tokens/s", "mean": _shown(summary["tokens"]["output_per_s"]), "count": summary["tokens"]["output"]})
    rows.append({"name": "Input tokens/s", "mean": _shown(summary["tokens"]["input_per_s"]), "count": summary["tokens"]["input"]})
    return rows


def _shown(value: float | int | None) -> float | int | str:
    return "" if value is None else round(value, 2)
