"""Metrics of one process, for Prometheus to scrape and for an OTLP receiver.

Figures are recorded once a request and once a step, never once a token. Gauges are read when somebody asks for them, on a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, NoOpMeterProvider, Observation
from opentelemetry.sdk.metrics import AlwaysOffExemplarFilter
from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry, ProcessCollector

from inference_service.config import Telemetry
from inference_service.messages import StepWork
from inference_service.telemetry import names, otlp
from inference_service.telemetry.names import Metric
from inference_service.telemetry.scrape import ScrapeServer

EXPORT_EVERY_S = 10.0
"""To the OTLP receiver."""

log = logging.getLogger(__name__)


class Metrics:
    """Makes the instruments, and tells of them where the configuration says; if nowhere, they do nothing.

    Of several front ends (`worker` 0, 1, ...) each has its own port for Prometheus: `telemetry.metrics_port` + worker.
    """

    def __init__(self, config: Telemetry, worker: int = 0) -> None:
        """Raises OSError when the port is taken."""
        self._registry = CollectorRegistry()
        self._server: ScrapeServer | None = None
        readers: list[MetricReader] = []
        if config.metrics_port is not None:
            readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=self._registry))
            port = config.metrics_port and config.metrics_port + worker
            self._server = ScrapeServer(self._registry, port)
            log.info("metrics on port %d", self.port)
        if endpoint := otlp.endpoint(config, "METRICS"):
            readers.append(PeriodicExportingMetricReader(otlp.metric_exporter(endpoint), EXPORT_EVERY_S * 1000))
        self._provider: MeterProvider = NoOpMeterProvider()
        if readers:
            resource = Resource.create({names.SERVICE_NAME: names.SERVER_SERVICE})
            self._provider = SdkMeterProvider(readers, resource, AlwaysOffExemplarFilter(), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("inference_service")
        self.process("", lambda: "self")

    @property
    def port(self) -> int | None:
        """Where /metrics is; None: nowhere."""
        return self._server.port if self._server else None

    def histogram(self, metric: Metric) -> Histogram:
        buckets = metric.buckets
        return self._meter.create_histogram(metric.name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=buckets)

    def counter(self, metric: Metric, attribute: str = "", values: Sequence[str] = ("",)) -> Count:
        """A counter, by an attribute if one is named; of its `values` those that are 0 from the beginning."""
        count = Count(attribute, values)
        self._meter.create_observable_counter(metric.name, [count.observe], metric.unit, metric.description)
        return count

    def gauge(self, metric: Metric, read: Callable[[], int]) -> None:
        """`read` is called, on a thread, whenever the metric is wanted."""
        self._meter.create_observable_gauge(metric.name, [lambda _: [Observation(int(read()))]], metric.unit, metric.description)

    def total(self, metric: Metric, read: Callable[[], int]) -> None:
        """The same, of a number that only grows."""
        self._meter.create_observable_counter(metric.name, [lambda _: [Observation(int(read()))]], metric.unit, metric.description)

    def process(self, name: str, pid: Callable[[], int | str]) -> None:
        """Memory, CPU time and open files of a process, for Prometheus: NAME_process_*."""
        ProcessCollector(name, pid, registry=self._registry)

    def shutdown(self) -> None:
        """Export what is left, within a few seconds, and stop."""
        if self._server:
            self._server.close()
        if isinstance(self._provider, SdkMeterProvider):
            self._provider.shutdown(timeout_millis=1000 * otlp.EXPORT_TIMEOUT_S)


class Count:
    """A counter at a tenth of the cost of the SDK's own: it is read when it is asked for."""

    def __init__(self, attribute: str = "", values: Sequence[str] = ("",)) -> None:
        self._attribute = attribute
        # They are told as 0 before anything happens, since Prometheus sees no increase from nothing to 1.
        self._counts = dict.fromkeys(values, 0)

    def add(self, number: int, value: str = "") -> None:
        self._counts[value] = self._counts.get(value, 0) + number

    def observe(self, _: CallbackOptions) -> Iterable[Observation]:
        counts = self._counts.copy()
        return [Observation(number, {self._attribute: value} if self._attribute else None) for value, number in counts.items()]


class RequestMetrics:
    """Of the requests that a front end serves."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._attributes = {names.OPERATION: "text_completion", names.PROVIDER: names.SERVER_SERVICE, names.REQUEST_MODEL: model}
        self._ttft = metrics.histogram(names.TTFT)
        self._tpot = metrics.histogram(names.TPOT)
        self._duration = metrics.histogram(names.DURATION)
        self._queue_time = metrics.histogram(names.QUEUE_TIME)
        self._requests = metrics.counter(names.REQUESTS, names.RPC_STATUS, ("OK", "RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL"))
        self._refusals = metrics.counter(names.REFUSALS, names.REASON, ("QUEUE_FULL",))
        self._input_tokens = metrics.counter(names.INPUT_TOKENS_COUNT)
        self._cached_tokens = metrics.counter(names.CACHED_TOKENS_COUNT)
        self._output_tokens = metrics.counter(names.OUTPUT_TOKENS_COUNT)

    def ended(
        self,
        code: str,
        *,
        arrival_ns: int,
        end_ns: int,
        refusal: str = "",
        scheduled_ns: int = 0,
        first_token_ns: int = 0,
        last_token_ns: int = 0,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
        longest_answer: int = 0,
    ) -> None:
        """A request has ended with a gRPC status; `refusal` says why it was not admitted.

        Times are `time.monotonic_ns()` readings, 0 for what never came. `completion_tokens` are of all choices, `longest_answer` of one.
        """
        attributes = self._attributes
        self._requests.add(1, code)
        if refusal:
            self._refusals.add(1, refusal)
        self._duration.record((end_ns - arrival_ns) / 1e9, attributes if code == "OK" else {**attributes, names.ERROR_TYPE: code})
        if scheduled_ns:
            self._queue_time.record((scheduled_ns - arrival_ns) / 1e9, attributes)
        if first_token_ns:
            self._ttft.record((first_token_ns - arrival_ns) / 1e9, attributes)
        if longest_answer > 1 and last_token_ns > first_token_ns:
            self._tpot.record((last_token_ns - first_token_ns) / (longest_answer - 1) / 1e9, attributes)
        self._input_tokens.add(prompt_tokens)
        self._cached_tokens.add(cached_tokens)
        self._output_tokens.add(completion_tokens)


class EngineMetrics:
    """Of the engine, which all front ends hear of: told by one of them alone, so that sums over all are right."""

    def __init__(self, metrics: Metrics) -> None:
        self._step_time = metrics.histogram(names.STEP_TIME)
        self._batch_size = metrics.histogram(names.BATCH_SIZE)
        self._prefill_tokens = metrics.counter(names.PREFILL_TOKENS)
        self._preemptions = metrics.counter(names.PREEMPTIONS_COUNT)

    def step(self, work: StepWork) -> None:
        """The engine has computed a step."""
        self._step_time.record(work.duration_ns / 1e9)
        self._batch_size.record(work.rows)
        self._prefill_tokens.add(work.prefill_tokens)
        self._preemptions.add(work.preemptions)
