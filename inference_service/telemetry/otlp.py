"""Exporters to an OTLP gRPC receiver, where one is configured."""

from __future__ import annotations

import os
from typing import Literal

from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.trace.export import SpanExporter

from inference_service.config import Telemetry

EXPORT_TIMEOUT_S = 3
"""Short, since a receiver that is away must not hold up the end of the process."""


def endpoint(config: Telemetry, signal: Literal["TRACES", "METRICS"]) -> str:
    """Where spans or metrics go: the configuration's receiver, else the environment's; "" where there is none."""
    from_environment = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    return config.otlp_endpoint or from_environment or ""


def span_exporter(endpoint: str) -> SpanExporter:
    # Only now: the import costs a quarter of a second.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S)


def metric_exporter(endpoint: str) -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(endpoint, insecure=not endpoint.startswith("https://"), timeout=EXPORT_TIMEOUT_S)
