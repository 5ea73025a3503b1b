"""Receives the traces of servers that export them by OTLP over gRPC, into the format of our own trace files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import msgspec
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from inference_service.telemetry.names import SERVICE_NAME


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A server of its own on a free port; `file` has a line of JSON for each span."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._server = grpc.server(ThreadPoolExecutor(1))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=1).wait()

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        lines = b""
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes).get(SERVICE_NAME, "")
            lines += b"".join(msgspec.json.encode(_record(span, service)) + b"\n" for scope in resource.scope_spans for span in scope.spans)
        with self._file.open("ab") as file:
            file.write(lines)
        return trace_service_pb2.ExportTraceServiceResponse()


def _record(span: Span, service: Any) -> dict[str, Any]:
    """As `telemetry.exporter.span_record` writes it."""
    record = {
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "service": service,
        "name": span.name,
        "kind": Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        "start_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "attributes": _attributes(span.attributes),
        "events": [{"name": event.name, "time_ns": event.time_unix_nano} for event in span.events],
    }
    return {key: value for key, value in record.items() if value not in ("", {}, [])}


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    kind = pair.value.WhichOneof("value")
    value: Any = getattr(pair.value, kind) if kind else None
    if kind == "array_value":
        return [getattr(one, one.WhichOneof("value") or "string_value") for one in value.values]
    return str(value) if kind in ("kvlist_value", "bytes_value") else value
