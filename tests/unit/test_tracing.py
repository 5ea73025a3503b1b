"""Spans of requests: exact sums, statuses, the file, and a real OTLP receiver."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from inference_service.config import Telemetry
from inference_service.messages import Sampling
from inference_service.telemetry import names
from inference_service.telemetry.clock import OFFSET_NS, to_unix_ns
from inference_service.telemetry.tracing import Tracing

ARRIVAL = 5_000_000_000
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Memory:
    """A Tracing that keeps its spans."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(Telemetry(), names.SERVER_SERVICE, self.exporter)

    def spans(self) -> dict[str, ReadableSpan]:
        self.tracing.flush()
        spans = {span.name: span for span in self.exporter.get_finished_spans()}
        self.exporter.clear()
        return spans


@pytest.fixture(scope="module")
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.tracing.shutdown()


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.integers(0, 10**12), min_size=4, max_size=4))
def test_children_add_up_to_the_nanosecond(memory: Memory, steps: list[int]) -> None:
    scheduled, first, last, end = (ARRIVAL + sum(steps[: n + 1]) for n in range(4))
    memory.tracing.request((), ARRIVAL).end("OK", end_ns=end, scheduled_ns=scheduled, first_token_ns=first, last_token_ns=last)
    spans = memory.spans()
    server = spans[names.GENERATE_SPAN]
    queue, prefill, decode = (spans[name] for name in (names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN))
    assert (server.start_time, server.end_time) == (to_unix_ns(ARRIVAL), to_unix_ns(end))
    assert (queue.start_time, queue.end_time, prefill.start_time, prefill.end_time) == (
        server.start_time, to_unix_ns(scheduled), to_unix_ns(scheduled), to_unix_ns(first),
    )  # fmt: skip
    assert (decode.start_time, decode.end_time) == (to_unix_ns(first), to_unix_ns(last))
    (event,) = server.events
    assert event.name == names.FIRST_TOKEN_EVENT
    assert duration(queue) + duration(prefill) == event.timestamp - to_unix_ns(ARRIVAL) == first - ARRIVAL
    assert server.attributes is not None
    assert server.attributes[names.TIME_TO_FIRST_TOKEN] == (first - ARRIVAL) / 1e9


def duration(span: ReadableSpan) -> int:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.end_time - span.start_time


def test_offset_is_that_of_the_clocks() -> None:
    assert to_unix_ns(7) - to_unix_ns(3) == 4
    assert OFFSET_NS > 10**18


def test_server_span_is_a_child_of_the_callers(memory: Memory) -> None:
    metadata = (("user-agent", "x"), ("traceparent", TRACEPARENT), ("tracestate", "vendor=1"), ("key-bin", b"\x00"))
    memory.tracing.request(metadata, ARRIVAL).end("OK", end_ns=ARRIVAL + 5, admitted=True)
    spans = memory.spans()
    server, queue = spans[names.GENERATE_SPAN], spans[names.QUEUE_SPAN]
    assert server.parent is not None
    assert server.parent.is_remote
    assert (f"{server.parent.trace_id:032x}", f"{server.parent.span_id:016x}") == tuple(TRACEPARENT.split("-")[1:3])
    assert server.kind is SpanKind.SERVER
    assert server.context is not None
    assert server.context.trace_state.get("vendor") == "1"
    assert queue.parent == server.context
    assert queue.context is not None
    assert queue.context.trace_id == server.context.trace_id


@pytest.mark.parametrize(
    "header", ["", "00-xyz", TRACEPARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32), "ff" + TRACEPARENT[2:]]
)
def test_a_bad_traceparent_starts_a_new_trace(memory: Memory, header: str) -> None:
    memory.tracing.request([("traceparent", header)], ARRIVAL).end("OK", end_ns=ARRIVAL + 5)
    assert memory.spans()[names.GENERATE_SPAN].parent is None


def test_a_caller_that_does_not_sample_is_obeyed(memory: Memory) -> None:
    trace = memory.tracing.request([("traceparent", TRACEPARENT[:-2] + "00")], ARRIVAL)
    trace.end("OK", end_ns=ARRIVAL + 5, scheduled_ns=ARRIVAL + 1, first_token_ns=ARRIVAL + 2, last_token_ns=ARRIVAL + 3)
    assert memory.spans() == {}


@pytest.mark.parametrize(
    ("reached", "children"),
    [
        ({}, []),
        ({"admitted": True}, [("queue", 0, 50)]),
        ({"scheduled_ns": ARRIVAL + 10}, [("queue", 0, 10), ("prefill", 10, 50)]),
        (
            {"scheduled_ns": ARRIVAL + 10, "first_token_ns": ARRIVAL + 20, "last_token_ns": ARRIVAL + 40},
            [("queue", 0, 10), ("prefill", 10, 20), ("decode", 20, 40)],
        ),
        # The engine's time of the only token is before it was streamed.
        (
            {"scheduled_ns": ARRIVAL + 10, "first_token_ns": ARRIVAL + 20, "last_token_ns": ARRIVAL + 19},
            [("queue", 0, 10), ("prefill", 10, 20), ("decode", 20, 20)],
        ),
    ],
)
def test_children_go_as_far_as_the_request(memory: Memory, reached: dict[str, Any], children: list[tuple[str, int, int]]) -> None:
    memory.tracing.request((), ARRIVAL).end("DEADLINE_EXCEEDED", end_ns=ARRIVAL + 50, **reached)
    spans = memory.spans()
    server = spans.pop(names.GENERATE_SPAN)
    assert len(server.events) == ("first_token_ns" in reached)
    began = to_unix_ns(ARRIVAL)
    assert [(name, (span.start_time or 0) - began, (span.end_time or 0) - began) for name, span in spans.items()] == children


@pytest.mark.parametrize(
    ("code", "number"), [("OK", 0), ("CANCELLED", 1), ("DEADLINE_EXCEEDED", 4), ("RESOURCE_EXHAUSTED", 8), ("UNAVAILABLE", 14)]
)
def test_status_follows_the_code(memory: Memory, code: str, number: int) -> None:
    memory.tracing.request((), ARRIVAL).end(code, end_ns=ARRIVAL + 5, message="the queue is full")
    memory.tracing.client_span(ARRIVAL, "client").end(code, end_ns=ARRIVAL + 5)
    spans = memory.spans()
    for name, description in ((names.GENERATE_SPAN, "the queue is full"), ("client", code)):
        span = spans[name]
        assert span.attributes is not None
        assert (span.attributes[names.RPC_STATUS], span.attributes[names.RPC_GRPC_STATUS]) == (code, number)
        assert span.attributes.get(names.ERROR_TYPE) == (None if code == "OK" else code)
        assert span.status.status_code is (StatusCode.UNSET if code == "OK" else StatusCode.ERROR)
        assert span.status.description == (None if code == "OK" else description)


def test_end_counts_once(memory: Memory) -> None:
    trace, span = memory.tracing.request((), ARRIVAL), memory.tracing.client_span(ARRIVAL)
    for code in ("OK", "CANCELLED"):
        trace.end(code, end_ns=ARRIVAL + 5)
        span.end(code, end_ns=ARRIVAL + 5)
    memory.tracing.flush()
    finished = memory.exporter.get_finished_spans()
    assert [(span.attributes or {})[names.RPC_STATUS] for span in finished] == ["OK", "OK"]
    memory.exporter.clear()


def test_attributes_of_a_request(memory: Memory) -> None:
    memory.tracing.request((), ARRIVAL).end(
        "OK",
        end_ns=ARRIVAL + 10**9,
        scheduled_ns=ARRIVAL + 10**8,
        first_token_ns=ARRIVAL + 3 * 10**8,
        last_token_ns=ARRIVAL + 9 * 10**8,
        request_id="r1",
        model="m",
        sampling=Sampling(0.5, 40, 0.9, 0.0, 2**64 - 1),
        max_tokens=64,
        prompt_tokens=12,
        cached_tokens=8,
        completion_tokens=4,
        finish_reasons=["length"],
        preemptions=2,
    )
    assert dict(memory.spans()[names.GENERATE_SPAN].attributes or {}) == {
        "rpc.system.name": "grpc",
        "rpc.method": "inference.v1.InferenceService/Generate",
        "rpc.response.status_code": "OK",
        "rpc.grpc.status_code": 0,
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.min_p": 0.0,
        "gen_ai.request.seed": "18446744073709551615",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.prompt_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.response.finish_reasons": ("length",),
        "inference.preemptions": 2,
        "gen_ai.latency.time_in_queue": 0.1,
        "gen_ai.latency.time_in_model_prefill": 0.2,
        "gen_ai.latency.time_in_model_decode": 0.6,
        "gen_ai.latency.time_to_first_token": 0.3,
        "gen_ai.response.time_to_first_chunk": 0.3,
        "gen_ai.latency.e2e": 1.0,
        "inference.time_per_output_token": 0.2,
    }


def test_client_and_server_share_a_trace(memory: Memory) -> None:
    client = memory.tracing.client_span(ARRIVAL, "client")
    assert client.metadata == (("traceparent", client.traceparent),)
    memory.tracing.request(client.metadata, ARRIVAL + 1).end("OK", end_ns=ARRIVAL + 5)
    client.end("OK", end_ns=ARRIVAL + 9, first_token_ns=ARRIVAL + 4, attributes={"loadgen.user": 3})
    spans = memory.spans()
    assert spans["client"].kind is SpanKind.CLIENT
    assert spans["client"].context is not None
    parent = spans[names.GENERATE_SPAN].parent
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (spans["client"].context.trace_id, spans["client"].context.span_id)
    assert (spans["client"].attributes or {})["loadgen.user"] == 3
    assert spans["client"].events[0].timestamp == to_unix_ns(ARRIVAL + 4)


def test_seeded_random_does_not_repeat_ids() -> None:
    memory = Memory()
    headers = set()
    for _ in range(2):
        random.seed(0)
        headers.add(memory.tracing.client_span(ARRIVAL).traceparent)
    memory.tracing.shutdown()
    assert len(headers) == 2


def test_off_writes_nothing_and_sends_no_header(tmp_path: Path) -> None:
    tracing = Tracing(Telemetry(traces=False, trace_file=str(tmp_path / "t.jsonl")), names.SERVER_SERVICE)
    span = tracing.client_span(ARRIVAL)
    assert (span.traceparent, span.metadata, tracing.enabled) == ("", (), False)
    span.end("OK", end_ns=ARRIVAL + 1)
    tracing.request([("traceparent", TRACEPARENT)], ARRIVAL).end("OK", end_ns=ARRIVAL + 1)
    tracing.flush()
    tracing.shutdown()
    assert list(tmp_path.iterdir()) == []


def test_client_spans_have_the_ids_that_were_sent_however_they_end(memory: Memory) -> None:
    first, second = memory.tracing.client_span(ARRIVAL, "first"), memory.tracing.client_span(ARRIVAL, "second")
    second.end("OK", end_ns=ARRIVAL + 1)
    memory.tracing.request((), ARRIVAL).end("OK", end_ns=ARRIVAL + 2)
    first.end("CANCELLED", end_ns=ARRIVAL + 3)
    spans = memory.spans()
    for name, client in (("first", first), ("second", second)):
        context = spans[name].context
        assert context is not None and client.traceparent == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    assert len({span.context.trace_id for span in spans.values() if span.context}) == 3


@pytest.mark.parametrize(("sampler", "flags"), [("always_off", "00"), ("parentbased_always_on", "01")])
def test_the_sampler_of_the_environment_decides(sampler: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    memory = Memory()
    client = memory.tracing.client_span(ARRIVAL, "client")
    client.end("OK", end_ns=ARRIVAL + 1)
    assert client.traceparent.endswith(f"-{flags}") and len(memory.spans()) == int(flags)
    memory.tracing.shutdown()


def test_a_disabled_sdk_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    memory = Memory()
    assert [memory.tracing.client_span(ARRIVAL).metadata for _ in range(2)] == [(), ()]
    memory.tracing.request([("traceparent", TRACEPARENT)], ARRIVAL).end("OK", end_ns=ARRIVAL + 1)
    assert not memory.tracing.enabled and memory.spans() == {}


def write_one(tracing: Tracing) -> None:
    tracing.request([("traceparent", TRACEPARENT)], ARRIVAL).end(
        "CANCELLED",
        end_ns=ARRIVAL + 50,
        scheduled_ns=ARRIVAL + 10,
        first_token_ns=ARRIVAL + 20,
        last_token_ns=ARRIVAL + 40,
        sampling=Sampling(1.0, 0, 1.0, 0.0, 2**64 - 1),
    )


def test_file_has_one_object_a_span_and_is_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    path = tmp_path / "new" / "traces.jsonl"
    for _ in range(2):
        tracing = Tracing(Telemetry(trace_file=str(path)), names.SERVER_SERVICE)
        write_one(tracing)
        tracing.shutdown()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["name"] for record in records] == ["queue", "prefill", "decode", names.GENERATE_SPAN] * 2
    server = records[3]
    assert server | {"attributes": {}, "span_id": ""} == {
        "trace_id": TRACEPARENT.split("-")[1],
        "span_id": "",
        "parent_id": TRACEPARENT.split("-")[2],
        "service": "inference-service",
        "name": "inference.v1.InferenceService/Generate",
        "kind": "SERVER",
        "start_ns": to_unix_ns(ARRIVAL),
        "end_ns": to_unix_ns(ARRIVAL + 50),
        "status": "ERROR",
        "status_message": "CANCELLED",
        "attributes": {},
        "events": [{"name": "first_token", "time_ns": to_unix_ns(ARRIVAL + 20)}],
    }
    assert {record["parent_id"] for record in records[:3]} == {server["span_id"]}


def test_file_is_opened_with_the_first_span(tmp_path: Path) -> None:
    tracing = Tracing(Telemetry(trace_file=str(tmp_path / "t.jsonl")), names.SERVER_SERVICE)
    tracing.shutdown()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["/dev/full", "/proc/traces.jsonl", "/dev/null/traces.jsonl"])
def test_a_disk_that_refuses_is_logged_once(path: str, caplog: pytest.LogCaptureFixture) -> None:
    tracing = Tracing(Telemetry(trace_file=path), names.SERVER_SERVICE)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            write_one(tracing)
            tracing.flush()
        tracing.shutdown()
    assert [record.name for record in caplog.records] == ["inference_service.telemetry.exporter"]
    assert path in caplog.text


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP gRPC receiver."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.received = threading.Event()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        self.received.set()
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def receiver() -> Iterator[tuple[Receiver, str]]:
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield receiver, f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("where", ["config", "config without scheme", "environment"])
def test_otlp_receiver_gets_all(receiver: tuple[Receiver, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    service, address = receiver
    endpoint = address if where == "config without scheme" else f"http://{address}"
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    if where == "environment":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    config = Telemetry(trace_file=str(tmp_path / "t.jsonl"), otlp_endpoint="" if where == "environment" else endpoint)
    tracing = Tracing(config, names.SERVER_SERVICE)
    write_one(tracing)
    tracing.shutdown()
    assert service.received.is_set(), "shutdown exports what is left"
    (batch,) = service.requests[0].resource_spans
    assert {attribute.key: attribute.value.string_value for attribute in batch.resource.attributes}["service.name"] == "inference-service"
    spans = {span.name: span for span in batch.scope_spans[0].spans}
    server = spans.pop(names.GENERATE_SPAN)
    assert sorted(spans) == ["decode", "prefill", "queue"]
    assert {span.parent_span_id for span in spans.values()} == {server.span_id}
    assert server.trace_id.hex() == TRACEPARENT.split("-")[1]
    assert server.parent_span_id.hex() == TRACEPARENT.split("-")[2]
    assert (server.start_time_unix_nano, server.end_time_unix_nano) == (to_unix_ns(ARRIVAL), to_unix_ns(ARRIVAL + 50))
    assert [event.name for event in server.events] == ["first_token"]
    assert server.status.code == 2
    assert list(tmp_path.iterdir()) == [], "no file beside OTLP"


def test_a_receiver_that_is_away_holds_up_nothing() -> None:
    tracing = Tracing(Telemetry(otlp_endpoint="http://127.0.0.1:1"), names.SERVER_SERVICE)
    write_one(tracing)
    stopper = threading.Thread(target=tracing.shutdown)
    stopper.start()
    stopper.join(60)
    assert not stopper.is_alive()
