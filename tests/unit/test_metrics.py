"""Metrics: what Prometheus reads over HTTP, and what an OTLP receiver is sent."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from inference_service.config import Telemetry
from inference_service.messages import Load, Step, StepWork
from inference_service.rpc.control import EngineLost
from inference_service.rpc.engine_client import EngineClient
from inference_service.telemetry import names
from inference_service.telemetry.metrics import EngineMetrics, Metrics, RequestMetrics
from tests.service.otlp_receiver import run_receiver

MS = 10**6
ARRIVAL = 5_000_000_000


@pytest.fixture(autouse=True)
def no_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    metrics = Metrics(Telemetry(metrics_port=0))
    yield metrics
    metrics.shutdown()


def scrape(metrics: Metrics) -> dict[tuple[str, str], float]:
    """By the sample's name and the value of the one label that matters, "" where there is none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [sample.labels.get(key, "") for key in ("le", "error_type", "reason", "rpc_response_status_code")]
            samples[sample.name, " ".join(filter(None, labels))] = sample.value
    return samples


def end_some(requests: RequestMetrics) -> None:
    """An answer of 11 tokens: 3 ms in the queue, the first token after 20 ms, then one each 2 ms; and a refusal."""
    requests.ended(
        "OK",
        arrival_ns=ARRIVAL,
        end_ns=ARRIVAL + 41 * MS,
        scheduled_ns=ARRIVAL + 3 * MS,
        first_token_ns=ARRIVAL + 20 * MS,
        last_token_ns=ARRIVAL + 40 * MS,
        prompt_tokens=100,
        cached_tokens=64,
        completion_tokens=11,
        longest_answer=11,
    )
    requests.ended("RESOURCE_EXHAUSTED", arrival_ns=ARRIVAL, end_ns=ARRIVAL + MS, refusal="QUEUE_FULL")


def test_requests_by_status_with_times_in_the_right_buckets(metrics: Metrics) -> None:
    requests = RequestMetrics(metrics, "m")
    assert scrape(metrics)["inference_requests_total", "OK"] == 0, "told before the first, so that its increase is seen"
    end_some(requests)
    samples = scrape(metrics)
    assert samples["inference_requests_total", "OK"] == samples["inference_requests_total", "RESOURCE_EXHAUSTED"] == 1
    assert samples["inference_refusals_total", "QUEUE_FULL"] == 1
    tokens = [samples[f"inference_{kind}_tokens_total", ""] for kind in ("input", "cached", "output")]
    assert tokens == [100, 64, 11]
    for name, below, above in (
        ("gen_ai_server_time_to_first_token_seconds", "0.01", "0.02"),
        ("gen_ai_server_time_per_output_token_seconds", "0.001", "0.0025"),
        ("inference_request_queue_time_seconds", "0.0025", "0.005"),
    ):
        assert (samples[f"{name}_bucket", below], samples[f"{name}_bucket", above]) == (0, 1), name
        assert samples[f"{name}_count", ""] == 1, "the refused one got no token"
    duration = "gen_ai_server_request_duration_seconds"
    assert samples[f"{duration}_sum", ""] == pytest.approx(0.041)
    assert samples[f"{duration}_count", "RESOURCE_EXHAUSTED"] == 1


def test_steps_are_counted_by_the_front_end_that_watches_the_engine(metrics: Metrics) -> None:
    engine = EngineMetrics(metrics)
    for work in (StepWork(3, 512, 4 * MS + MS // 2, 0), StepWork(200, 0, 7 * MS, 2)):
        engine.step(work)
    samples = scrape(metrics)
    assert samples["inference_step_duration_seconds_bucket", "0.004"] == 0
    assert samples["inference_step_duration_seconds_bucket", "0.006"] == 1
    assert samples["inference_step_requests_sum", ""] == 203
    assert (samples["inference_prefill_tokens_total", ""], samples["inference_preemptions_total", ""]) == (512, 2)


def test_gauges_are_read_when_they_are_asked_for(metrics: Metrics) -> None:
    values = iter((1, 5))
    metrics.gauge(names.WAITING, lambda: next(values))
    metrics.gauge(names.READY, lambda: True)
    assert [scrape(metrics)["inference_queue_requests", ""] for _ in range(2)] == [1, 5]
    assert scrape(metrics)["inference_ready", ""] == 1, "a gauge that fails takes no other with it"


def test_each_worker_has_a_port_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            Metrics(Telemetry(metrics_port=port - 1), worker=1)


def test_nowhere_to_tell_means_nothing_is_done() -> None:
    threads = threading.active_count()
    metrics = Metrics(Telemetry())
    end_some(RequestMetrics(metrics, "m"))
    EngineMetrics(metrics).step(StepWork(1, 1, 1, 1))
    assert metrics.port is None and threading.active_count() == threads
    metrics.shutdown()


def test_an_otlp_receiver_gets_all_at_the_end() -> None:
    with run_receiver() as receiver:
        metrics = Metrics(Telemetry(otlp_endpoint=receiver.endpoint))
        end_some(RequestMetrics(metrics, "m"))
        metrics.gauge(names.READY, lambda: True)
        metrics.shutdown()
        sent = receiver.metrics
    (point,) = sent["gen_ai.server.time_to_first_token"].histogram.data_points
    assert tuple(point.explicit_bounds) == names.TTFT.buckets
    assert (point.count, point.sum) == (1, pytest.approx(0.02))
    labels = {attribute.key: attribute.value.string_value for attribute in point.attributes}
    assert labels == {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "inference-service", "gen_ai.request.model": "m"}
    assert sent["gen_ai.server.time_to_first_token"].unit == "s"
    assert sent["inference.requests"].sum.is_monotonic
    assert sent["inference.ready"].gauge.data_points[0].as_int == 1


def test_what_an_engine_has_made_before_a_front_end_joins_is_none_of_its_rate() -> None:
    engine = EngineClient("joined", on_change=lambda: None)
    for made in (5_000_000, 5_000_003):
        engine._dispatch(Step(0, [], Load(1, 0, 0, 0, output_tokens=made)))
    assert engine.output_tokens == 3
    engine.follow(EngineLost("it was killed", 1.0))
    for made in (0, 4):
        engine._dispatch(Step(0, [], Load(1, 0, 0, 0, output_tokens=made)))
    assert engine.output_tokens == 7
