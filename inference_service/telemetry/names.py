"""Every name that telemetry writes: services, spans, events, attributes and metrics.

They follow OpenTelemetry's conventions for generative AI (`gen_ai.*`) and RPC (`rpc.*`). `gen_ai.latency.*` are vLLM's names, so that
dashboards made for vLLM show this service as well. What no convention has is under `inference.*`.
"""

from __future__ import annotations

from typing import NamedTuple

# Resources
SERVICE_NAME = "service.name"
SERVER_SERVICE = "inference-service"
LOADGEN_SERVICE = "loadgen"

# Spans; client and server spans are called as their RPC
GENERATE_SPAN = "inference.v1.InferenceService/Generate"
QUEUE_SPAN = "queue"
PREFILL_SPAN = "prefill"
DECODE_SPAN = "decode"
START_SPAN = "start"
"""A process from its beginning to readiness; its children are the phases."""

# Events
FIRST_TOKEN_EVENT = "first_token"
PROGRESS_EVENT = "progress"
PROGRESS_TEXT = "inference.progress"
"""What the engine told of its start."""

# The call and how it ended
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
"""The gRPC status code's name, such as CANCELLED; an HTTP peer's spans have its number as text."""
RPC_GRPC_STATUS = "rpc.grpc.status_code"
"""The same as a number, as older dashboards expect it."""
ERROR_TYPE = "error.type"

# The request
REQUEST_ID = "gen_ai.request.id"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_MIN_P = "gen_ai.request.min_p"
REQUEST_SEED = "gen_ai.request.seed"
"""As text: 64 unsigned bits do not fit OTLP's integers."""
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_CHOICES = "gen_ai.request.choice.count"
"""Only where it is not 1, as the convention has it."""

# The answer
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
"""vLLM's name of INPUT_TOKENS."""
COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
"""vLLM's name of OUTPUT_TOKENS."""
PREEMPTIONS = "inference.preemptions"

# What was said; only with telemetry.record_prompts
INPUT_MESSAGES = "gen_ai.input.messages"
OUTPUT_MESSAGES = "gen_ai.output.messages"

# Of metrics alone
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
REASON = "reason"
"""Why a request was refused, as ErrorInfo has it."""

# Times, in seconds
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
TIME_E2E = "gen_ai.latency.e2e"
TIME_PER_OUTPUT_TOKEN = "inference.time_per_output_token"


class Metric(NamedTuple):
    """A metric; `buckets` are the upper edges of a histogram's."""

    name: str
    unit: str
    """As UCUM has it; a count of things is {thing}, and Prometheus leaves that out of the name."""
    description: str
    buckets: tuple[float, ...] = ()


# Histograms of requests: the conventions' buckets, with lower edges for fast models before them
TTFT = Metric(
    "gen_ai.server.time_to_first_token",
    "s",
    "From a request's arrival to its first token",
    (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TPOT = Metric(
    "gen_ai.server.time_per_output_token",
    "s",
    "Of each token after a request's first, on average",
    (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
DURATION = Metric(
    "gen_ai.server.request.duration",
    "s",
    "From a request's arrival to its end",
    (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
QUEUE_TIME = Metric("inference.request.queue_time", "s", "From a request's arrival to its first step", TTFT.buckets)

# Counters of requests
REQUESTS = Metric("inference.requests", "{request}", "Requests that have ended, by gRPC status")
REFUSALS = Metric("inference.refusals", "{request}", "Requests that were not admitted, by reason")
INPUT_TOKENS_COUNT = Metric("inference.input_tokens", "{token}", "Prompt tokens of requests that have ended")
CACHED_TOKENS_COUNT = Metric("inference.cached_tokens", "{token}", "Of those, found in the prefix cache")
OUTPUT_TOKENS_COUNT = Metric("inference.output_tokens", "{token}", "Tokens of the answers of requests that have ended")

# The engine's steps
STEP_TIME = Metric(
    "inference.step.duration",
    "s",
    "Of a step: what passes between two tokens of a request",
    (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5),
)
BATCH_SIZE = Metric("inference.step.requests", "{request}", "Requests that a step computed", tuple(2.0**n for n in range(11)))
PREFILL_TOKENS = Metric("inference.prefill_tokens", "{token}", "Prompt tokens computed")
PREEMPTIONS_COUNT = Metric("inference.preemptions", "{preemption}", "Running requests whose KV pages were taken for others")
LOSSES = Metric("inference.engine.losses", "{engine}", "Engines that were lost; another one is started, within server.engine_restarts")

LOST_SPANS = Metric("inference.telemetry.lost_spans", "{span}", "Spans that the trace file or the OTLP receiver did not take")

# Gauges
WAITING = Metric("inference.queue.requests", "{request}", "Requests that wait for a place in the batch")
RUNNING = Metric("inference.running.requests", "{request}", "Requests that are being computed")
PAGES_USED = Metric("inference.kv.used", "{page}", "KV pages that running requests hold")
PAGES_CACHED = Metric("inference.kv.cached", "{page}", "KV pages of ended requests, kept until they are needed")
PAGES_TOTAL = Metric("inference.kv.total", "{page}", "KV pages that there are")
COMPILES = Metric("inference.compiles", "{kernel}", "Kernels compiled or loaded since the engine was ready; each held up requests")
READY = Metric("inference.ready", "", "1: requests are admitted; 0: starting, draining, or without an engine")
DRAINING = Metric("inference.draining", "", "1: a drain has begun")
STREAMS = Metric("inference.streams", "{stream}", "Generate calls that are open")
TASKS = Metric("inference.tasks", "{task}", "Tasks of the event loop")
OPEN_SPANS = Metric("inference.telemetry.open_spans", "{span}", "Spans that have begun and not ended")
