"""Spans of requests, made by hand, with their times given: the server's and the load generator's.

A process makes one `Tracing` and shuts it down at its end:

    tracing = Tracing(config.telemetry, names.SERVER_SERVICE)      # or names.LOADGEN_SERVICE
    ...
    tracing.shutdown()                                             # writes what is left

The server keeps what the caller sent when a request arrives, and writes all its spans at once when it has ended:

    trace = tracing.request(context.invocation_metadata(), arrival_ns)
    trace.end("OK", end_ns=..., admitted=True, scheduled_ns=..., first_token_ns=..., last_token_ns=..., request_id=..., ...)

A client sends `span.traceparent` in the metadata (or HTTP header) `traceparent`; it is "" when the request is not traced:

    span = tracing.client_span(start_ns)
    metadata = span.metadata                                       # (("traceparent", ...),), or () when not traced
    span.end("OK", end_ns=..., first_token_ns=..., last_token_ns=..., prompt_tokens=..., completion_tokens=..., request_id=..., model=...)

All times are `time.monotonic_ns()` readings; 0 means "never got there". Codes are names of gRPC codes ("OK", "CANCELLED"); a client of
another protocol may give what names its errors there. A code other than OK makes the span an ERROR with that code as `error.type`:
cancelled requests too, since they were not served to the end; they are told from failures by their code. `end` counts once; what
follows is ignored. Without `telemetry.traces` every method returns at once.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from inference_service.config import Telemetry
from inference_service.messages import Sampling
from inference_service.telemetry import names, otlp
from inference_service.telemetry.attributes import call_attributes, latency_attributes, sampling_attributes, usage_attributes
from inference_service.telemetry.clock import to_unix_ns
from inference_service.telemetry.delivery import Delivery
from inference_service.telemetry.exporter import JsonLinesExporter

Metadata = Iterable[tuple[str, str | bytes]]

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one process and exports them in the background: to OTLP gRPC where an endpoint is set, else to a file.

    `exporter` replaces both, for tests.
    """

    def __init__(self, config: Telemetry, service: str, exporter: SpanExporter | None = None) -> None:
        self.open_traces = 0
        """Requests whose spans are still to be written."""
        self.ids = _Ids()
        self.tracer: Tracer | None = None
        """None: nothing is traced."""
        self._provider: TracerProvider | None = None
        self._delivery: Delivery | None = None
        # Where the SDK is disabled, its tracers make nothing, and would leave the ids that are chosen here to the next request.
        if not config.traces or os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true":
            return
        self._provider = TracerProvider(
            resource=Resource.create({names.SERVICE_NAME: service}), id_generator=self.ids, shutdown_on_exit=False
        )
        self._delivery = Delivery(exporter or _exporter(config))
        # The queue is bounded: while a receiver is away, the oldest spans give way to new ones.
        self._provider.add_span_processor(BatchSpanProcessor(self._delivery, max_queue_size=16384, schedule_delay_millis=1000))
        self.tracer = self._provider.get_tracer("inference_service")

    @property
    def enabled(self) -> bool:
        return self.tracer is not None

    @property
    def lost_spans(self) -> int:
        """Spans that the file or the receiver did not take."""
        return self._delivery.lost if self._delivery else 0

    def request(self, metadata: Metadata | None, arrival_ns: int) -> RequestTrace:
        """Begin a server's trace. `metadata` is the call's; without a valid `traceparent` in it the trace is a new one."""
        if self.tracer is None:
            return RequestTrace(None, Context(), arrival_ns)
        carrier = {key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)}
        parent = _PROPAGATOR.extract(carrier, Context()) if carrier else Context()
        return RequestTrace(self, parent, arrival_ns)

    def client_span(self, start_ns: int, name: str = names.GENERATE_SPAN) -> ClientSpan:
        """Begin a client's span, and a new trace with it."""
        return ClientSpan(None if self.tracer is None else self, start_ns, name)

    def sampled(self, trace_id: int, name: str) -> bool:
        """Whether a new trace is kept, as OTEL_TRACES_SAMPLER says."""
        if self._provider is None:
            return False
        decision = self._provider.sampler.should_sample(Context(), trace_id, name).decision
        return bool(decision.is_sampled())  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Export what has ended so far; blocks."""
        if self._provider is not None:
            self._provider.force_flush()

    def shutdown(self) -> None:
        """Export what is left, within a few seconds, and stop."""
        if self._provider is not None and self._delivery is not None:
            self._delivery.closing()
            self._provider.shutdown()


class RequestTrace:
    """A request's trace at the server, from arrival to end."""

    __slots__ = ("_parent", "_tracing", "arrival_ns", "span_id", "trace_id")

    trace_id: int
    """Chosen at arrival, so that logs can have it; 0 when not traced."""
    span_id: int

    def __init__(self, tracing: Tracing | None, parent: Context, arrival_ns: int) -> None:
        self._tracing = tracing
        self._parent = parent
        self.arrival_ns = arrival_ns
        self.trace_id = self.span_id = 0
        if tracing is not None:
            tracing.open_traces += 1
            self.trace_id = get_current_span(parent).get_span_context().trace_id or tracing.ids.generate_trace_id()
            self.span_id = tracing.ids.generate_span_id()

    def end(
        self,
        code: str,
        *,
        end_ns: int,
        message: str = "",
        admitted: bool = False,
        scheduled_ns: int = 0,
        first_token_ns: int = 0,
        last_token_ns: int = 0,
        request_id: str = "",
        model: str = "",
        sampling: Sampling | None = None,
        max_tokens: int = 0,
        prompt_tokens: int = 0,
        cached_tokens: int = 0,
        completion_tokens: int = 0,
        longest_answer: int = 0,
        choices: int = 1,
        finish_reasons: Sequence[str] = (),
        preemptions: int = 0,
        content: Mapping[str, str] | None = None,
    ) -> None:
        """Write the server span and its children, as far as the request got.

        `queue` is [arrival, scheduled], where the request was admitted to the queue; `prefill` is [scheduled, first token], `decode`
        [first token, last token]. With `first_token_ns` when the first token was streamed, queue + prefill is the server's TTFT to the
        nanosecond. A child that the request did not get through ends with it.

        Of several choices, `completion_tokens` is the sum; the first token is the first of any, and `longest_answer` says how many tokens
        came one after the other. `content` is what was said (content.py), where that may be recorded.
        """
        tracing, self._tracing = self._tracing, None
        if tracing is None or tracing.tracer is None:
            return
        tracing.open_traces -= 1
        tracer = tracing.tracer
        arrival_ns = self.arrival_ns
        if first_token_ns:
            scheduled_ns = scheduled_ns or arrival_ns
            last_token_ns = max(last_token_ns, first_token_ns)
        attributes = {
            **call_attributes(names.GENERATE_SPAN, code),
            **sampling_attributes(sampling, max_tokens),
            **usage_attributes(request_id, model, prompt_tokens, completion_tokens),
            **latency_attributes(arrival_ns, first_token_ns, last_token_ns, end_ns, longest_answer or completion_tokens),
            names.CACHED_TOKENS: cached_tokens,
            names.PREEMPTIONS: preemptions,
            **(content or {}),
        }
        if choices != 1:
            attributes[names.REQUEST_CHOICES] = choices
        if finish_reasons:
            attributes[names.FINISH_REASONS] = list(finish_reasons)
        if scheduled_ns:
            attributes[names.TIME_IN_QUEUE] = (scheduled_ns - arrival_ns) / 1e9
        if first_token_ns:
            attributes[names.TIME_IN_PREFILL] = (first_token_ns - scheduled_ns) / 1e9
            attributes[names.TIME_IN_DECODE] = (last_token_ns - first_token_ns) / 1e9

        tracing.ids.next = (self.trace_id, self.span_id)
        span = tracer.start_span(names.GENERATE_SPAN, self._parent, SpanKind.SERVER, attributes, start_time=to_unix_ns(arrival_ns))
        if first_token_ns:
            span.add_event(names.FIRST_TOKEN_EVENT, timestamp=to_unix_ns(first_token_ns))
        inside = set_span_in_context(span, Context())

        def child(name: str, start_ns: int, stop_ns: int) -> None:
            tracer.start_span(name, inside, start_time=to_unix_ns(start_ns)).end(to_unix_ns(stop_ns or end_ns))

        if admitted or scheduled_ns:
            child(names.QUEUE_SPAN, arrival_ns, scheduled_ns)
        if scheduled_ns:
            child(names.PREFILL_SPAN, scheduled_ns, first_token_ns)
        if first_token_ns:
            child(names.DECODE_SPAN, first_token_ns, last_token_ns)
        _end(span, code, message, end_ns)


class ClientSpan:
    """A request as its client saw it. The span is made when it ends: that takes a tenth of a millisecond, which would be taken for TTFT."""

    __slots__ = ("_name", "_span_id", "_start_ns", "_trace_id", "_tracing", "traceparent")

    traceparent: str
    """The W3C header that makes the server's spans part of this trace; "" when not traced."""

    def __init__(self, tracing: Tracing | None, start_ns: int, name: str) -> None:
        self._tracing = tracing
        self._start_ns = start_ns
        self._name = name
        self._trace_id = self._span_id = 0
        self.traceparent = ""
        if tracing is not None:
            self._trace_id, self._span_id = tracing.ids.generate_trace_id(), tracing.ids.generate_span_id()
            self.traceparent = f"00-{self._trace_id:032x}-{self._span_id:016x}-{tracing.sampled(self._trace_id, name):02x}"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata that carries the traceparent; empty when not traced."""
        return (("traceparent", self.traceparent),) if self.traceparent else ()

    def end(
        self,
        code: str,
        *,
        end_ns: int,
        message: str = "",
        first_token_ns: int = 0,
        last_token_ns: int = 0,
        request_id: str = "",
        model: str = "",
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        attributes: Mapping[str, str | int | float | bool] | None = None,
    ) -> None:
        """Write the span. `first_token_ns` is when the first token that is not empty was received; `attributes` are further ones."""
        tracing, self._tracing = self._tracing, None
        if tracing is None or tracing.tracer is None:
            return
        tracing.ids.next = (self._trace_id, self._span_id)
        span = tracing.tracer.start_span(
            self._name,
            Context(),
            SpanKind.CLIENT,
            {
                **call_attributes(self._name, code),
                **usage_attributes(request_id, model, prompt_tokens, completion_tokens),
                **latency_attributes(self._start_ns, first_token_ns, last_token_ns, end_ns, completion_tokens),
                **(attributes or {}),
            },
            start_time=to_unix_ns(self._start_ns),
        )
        if first_token_ns:
            span.add_event(names.FIRST_TOKEN_EVENT, timestamp=to_unix_ns(first_token_ns))
        _end(span, code, message, end_ns)


class _Ids(IdGenerator):
    """Ids from the operating system: a load test that seeds `random` must not repeat the ids of the one before it."""

    next: tuple[int, int] | None = None
    """The (trace, span) ids of the next span, where they were chosen before."""

    def generate_span_id(self) -> int:
        # The SDK asks for the span's id last.
        chosen, self.next = self.next, None
        return chosen[1] if chosen else secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.next[0] if self.next else secrets.randbits(128) or 1


def _exporter(config: Telemetry) -> SpanExporter:
    endpoint = otlp.endpoint(config, "TRACES")
    return otlp.span_exporter(endpoint) if endpoint else JsonLinesExporter(config.trace_file)


def _end(span: Span, code: str, message: str, end_ns: int) -> None:
    if code != "OK":
        span.set_status(Status(StatusCode.ERROR, message or code))
    span.end(to_unix_ns(end_ns))
