"""Log lines as JSON: one object each, with the ids of the request at hand."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inference_service.config import Telemetry
from inference_service.telemetry import names
from inference_service.telemetry.logs import REQUEST, JsonFormatter, RequestIds, Seldom
from inference_service.telemetry.tracing import Tracing

log = logging.getLogger("tests.logs")


@pytest.fixture
def lines() -> Any:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("server"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.removeHandler(handler)


def test_a_line_is_an_object() -> None:
    before = datetime.now(UTC)
    # Not logged: pytest would keep the line, and could not pass it on.
    record = logging.LogRecord("tests.logs", logging.WARNING, "", 0, "pages: %d of\n%s", (3, "all\ud800"), None)
    line = json.loads(JsonFormatter("server").format(record))
    assert before <= datetime.fromisoformat(line.pop("time")) <= datetime.now(UTC)
    assert line == {"level": "WARNING", "process": "server", "logger": "tests.logs", "message": "pages: 3 of\nall\ud800"}


def test_an_exception_is_in_its_line(lines: Any) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed")
    (line,) = lines()
    assert line["exception"].startswith("Traceback") and line["exception"].endswith("ValueError: no")


def test_what_a_library_repeats_is_logged_once_a_minute() -> None:
    def record(name: str, message: str, at: float, *values: object) -> logging.LogRecord:
        made = logging.LogRecord(name, logging.WARNING, "", 0, message, values, None)
        made.created = at
        return made

    seldom = Seldom()
    exporter = "opentelemetry.exporter.otlp"
    passed = [
        (at, message)
        for at in range(0, 121, 10)
        for message in ("failed in %d", "retrying")
        if seldom.filter(record(exporter, message, at + 1e9, at))
    ]
    assert passed == [(at, message) for at in (0, 60, 120) for message in ("failed in %d", "retrying")]
    assert all(seldom.filter(record("inference_service.rpc", "a stream", 1e9)) for _ in range(3)), "what the service says is never left out"


async def test_tasks_have_the_ids_of_their_requests(lines: Any) -> None:
    async def serve(request_id: str, trace_id: int) -> None:
        REQUEST.set(RequestIds(request_id, trace_id, 7 if trace_id else 0))
        await asyncio.sleep(0)
        await asyncio.to_thread(log.info, "from %s", request_id)

    await asyncio.gather(asyncio.create_task(serve("a", 2**127)), asyncio.create_task(serve("b", 0)))
    log.info("from nobody")
    by_message = {line["message"]: line for line in lines()}
    traced, untraced, nobody = (by_message[f"from {who}"] for who in ("a", "b", "nobody"))
    assert (traced["request_id"], traced["trace_id"], traced["span_id"]) == ("a", "8" + "0" * 31, "0" * 15 + "7")
    assert untraced["request_id"] == "b" and "trace_id" not in untraced
    assert "request_id" not in nobody


def test_a_request_s_lines_and_its_span_have_the_same_ids(lines: Any) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(Telemetry(), names.SERVER_SERVICE, exporter)
    for header in ([], [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")]):
        trace = tracing.request(header, 1)
        REQUEST.set(RequestIds("r", trace.trace_id, trace.span_id))
        log.info("served")
        trace.end("OK", end_ns=5, scheduled_ns=2, first_token_ns=3, last_token_ns=4)
    REQUEST.set(None)
    tracing.shutdown()
    spans = [span.context for span in exporter.get_finished_spans() if span.name == names.GENERATE_SPAN]
    logged = [(int(line["trace_id"], 16), int(line["span_id"], 16)) for line in lines()]
    assert logged == [(context.trace_id, context.span_id) for context in spans if context]
    assert logged[1][0] == 0x0AF7651916CD43DD8448EB211C80319C
