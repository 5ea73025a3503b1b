"""Every name that telemetry writes: services, spans, events and attributes.

They follow OpenTelemetry's conventions for generative AI (`gen_ai.*`) and RPC (`rpc.*`). `gen_ai.latency.*` are vLLM's names, so that
dashboards made for vLLM show this service as well. What no convention has is under `inference.*`.
"""

from __future__ import annotations

# Resources
SERVICE_NAME = "service.name"
SERVER_SERVICE = "inference-service"
LOADGEN_SERVICE = "loadgen"

# Spans; client and server spans are called as their RPC
GENERATE_SPAN = "inference.v1.InferenceService/Generate"
QUEUE_SPAN = "queue"
PREFILL_SPAN = "prefill"
DECODE_SPAN = "decode"

# Events
FIRST_TOKEN_EVENT = "first_token"

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

# Times, in seconds
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
TIME_E2E = "gen_ai.latency.e2e"
TIME_PER_OUTPUT_TOKEN = "inference.time_per_output_token"
