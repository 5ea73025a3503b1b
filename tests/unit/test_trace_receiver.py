"""Traces of other servers, by a real exporter over a real connection, end in a file that our own tools read."""

from __future__ import annotations

from pathlib import Path

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from baselines.traces import TraceReceiver
from inference_service.telemetry.spans import read_spans


def test_spans_are_written_as_ours_are(tmp_path: Path) -> None:
    receiver = TraceReceiver(file := tmp_path / "peer.traces.jsonl")
    receiver.start()
    provider = TracerProvider(resource=Resource.create({"service.name": "peer"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=receiver.address, insecure=True)))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("request") as parent, tracer.start_as_current_span("prefill") as child:
        child.set_attributes({"tokens": 7, "share": 0.5, "names": ["a", "b"], "last": True})
        child.add_event("first token")
    provider.shutdown()
    receiver.stop()
    spans, torn = read_spans([file])
    assert not torn
    prefill, request = spans
    assert (request.name, request.service, request.parent_id) == ("request", "peer", "")
    assert (prefill.parent_id, prefill.trace_id) == (request.span_id, request.trace_id)
    assert prefill.attributes == {"tokens": 7, "share": 0.5, "names": ["a", "b"], "last": True}
    assert [event.name for event in prefill.events] == ["first token"]
    assert request.start_ns <= prefill.start_ns <= prefill.end_ns <= request.end_ns
    assert parent.get_span_context().span_id == int(request.span_id, 16)
