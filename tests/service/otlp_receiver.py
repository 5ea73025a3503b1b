"""A real OTLP gRPC receiver, which keeps what it is sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Takes spans and metrics."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.requests: list[Any] = []
        self.came = threading.Event()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.requests.append(request)
        self.came.set()
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            return trace_service_pb2.ExportTraceServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()

    @property
    def spans(self) -> list[Span]:
        traces = [request for request in self.requests if isinstance(request, trace_service_pb2.ExportTraceServiceRequest)]
        return [span for request in traces for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]

    @property
    def metrics(self) -> dict[str, Any]:
        """The newest state of each, by name."""
        sent = [request for request in self.requests if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest)]
        return {
            metric.name: metric
            for request in sent
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }


@contextmanager
def run_receiver(port: str = "0") -> Iterator[Receiver]:
    """On a free port, or that one; `endpoint` says where."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()


def attributes(span: Span) -> dict[str, Any]:
    """As plain values."""
    return {attribute.key: _plain(attribute.value) for attribute in span.attributes}


def _plain(value: AnyValue) -> Any:
    if value.HasField("array_value"):
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, str(value.WhichOneof("value")))
