"""The one configuration tree: everything that an experiment needs, read from one YAML file.

Server, load generator and comparisons read the same file. Unknown keys and values of the wrong type are errors that name the key.
A 0 or "auto" means "derive it"; what was derived is printed by `inference-service check` and at start.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from inference_service.comparison import Comparison
from inference_service.loadtest import Loadtest
from inference_service.sections import Count, CountOrAuto, Port, PositiveSeconds, Seconds, Section, readable


class ConfigError(ValueError):
    """The configuration is wrong; the message names the key."""


class Model(Section, frozen=True):
    """Which model, and in which form."""

    path: str = "smollm2-135m-instruct"
    """A local Hugging Face directory, a directory of `configs/models/`, a hub id, or the name of a model that `fetch` knows."""
    name: str = ""
    """The name that requests may give. Empty: the last part of the path."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights, activations and KV cache. auto: the checkpoint's on a GPU, float32 on a CPU."""
    quantization: Literal["none", "fp8"] = "none"
    """fp8: weights of layers are rounded to FP8 when they are loaded, in blocks of 128 x 128. none: they stay as the checkpoint has them,
    in FP8 where it says so."""
    load_format: Literal["auto", "dummy", "echo"] = "auto"
    """auto: the checkpoint's safetensors. dummy: random weights of config.json's shape. echo: no model at all, each answer counts up from
    its prompt's last token id (to measure and test the service around the model)."""
    echo_step_ms: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """How long a step of the echo engine takes."""
    max_context: CountOrAuto = 0
    """Most tokens that prompt and answer may have together. 0: what the checkpoint declares."""


class Device(Section, frozen=True):
    """Where the model runs."""

    kind: Literal["auto", "cpu", "cuda"] = "auto"
    arch: str = "auto"
    """The GPU architecture that this file was written for, such as sm_90; another one at start is an error."""
    threads: CountOrAuto = 0
    """Threads that compute on a CPU. 0: one a core."""


class Batch(Section, frozen=True):
    """How large a step may be."""

    max_requests: Count = 32
    """Requests computed at once."""
    max_step_tokens: Count = 512
    """Tokens computed in a step: its decodes, then prefill chunks."""
    max_prefill_tokens: CountOrAuto = 0
    """Prefill tokens in a step that also decodes, so that decodes keep their pace. 0: measured at start, the fewest that prefill at nearly
    the best rate, or a quarter of max_step_tokens where steps are too slow to be timed."""

    @property
    def step_tokens(self) -> int:
        """max_step_tokens, raised where needed so that every running request can decode in one step."""
        return max(self.max_step_tokens, self.max_requests)

    @property
    def prefill_tokens(self) -> int:
        """max_prefill_tokens, or what stands for it until it is measured."""
        return self.max_prefill_tokens or max(1, self.max_step_tokens // 4)


class Cache(Section, frozen=True):
    """The paged KV cache."""

    page_size: Count = 16
    """Tokens a page holds."""
    pages: CountOrAuto = 0
    """Pages in all. 0: on a CPU as many as memory_gib holds, on a GPU as many as gpu_memory_fraction leaves room for."""
    memory_gib: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Memory for the pages on a CPU, where `pages` is 0."""
    gpu_memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that weights, graphs, activations and pages may use together, where `pages` is 0."""
    dtype: Literal["auto", "fp8"] = "auto"
    """fp8: keys and values are rounded to FP8 (E4M3), without scales, so that twice as many tokens fit. auto: the model's."""
    prefix: bool = True
    """Keeps pages of finished requests and shares them with requests of the same beginning."""


class Kernels(Section, frozen=True):
    """The backend to force for an operator; auto: what is measured fastest, else the support table's first."""

    attention_decode: str = "auto"
    attention_prefill: str = "auto"
    attention_mixed: str = "auto"
    """Attention of a step with prefill that a CUDA graph holds; auto: longer steps attend as was measured fastest for their size."""
    kv_append: str = "auto"
    """QK norm, rotary embedding, and appending to the cache."""
    mla_decode: str = "auto"
    """This and the next three stand for the first four where the cache holds latents, as with DeepSeek."""
    mla_prefill: str = "auto"
    mla_mixed: str = "auto"
    mla_append: str = "auto"
    routing: str = "auto"
    grouped_routing: str = "auto"
    """DeepSeek's."""
    input_routing: str = "auto"
    """Llama 4's."""
    moe: str = "auto"
    moe_fp8: str = "auto"
    """This stands for `moe`, and `gemm_fp8` for `gemm` within layers, where weights are in FP8."""
    gemm: str = "auto"
    gemm_fp8: str = "auto"
    norm: str = "auto"
    sampling: str = "auto"


class Server(Section, frozen=True):
    """The gRPC server."""

    host: str = "127.0.0.1"
    port: Port = 50051
    """0: any free port; the one taken is printed."""
    workers: Count = 1
    """Front-end processes on the one port, for one engine. Streams are spread among them by connection."""
    admin_port: Port | None = None
    """Where Drain, profiling, reflection and channelz are, in plaintext on 127.0.0.1. null: Drain and reflection on `port`."""
    health_port: Port | None = None
    """Where health is answered in plaintext and without a token, for probes that know neither; on all addresses. null: on `port` alone."""
    max_queue: CountOrAuto = 256
    """Requests that may be in flight beyond batch.max_requests, and so wait; one more is RESOURCE_EXHAUSTED. An eighth of it is there in
    addition for what gRPC sends again after such a refusal."""
    max_message_mib: Count = 4
    """Largest request message."""
    stuck_reader_s: PositiveSeconds = 30.0
    """A client that takes no message for so long is cut off."""
    keepalive_s: Annotated[float, Meta(ge=0.1, le=86400)] = 30.0
    """A connection that has been silent for so long is asked for a sign of life, and given up when none comes for as long again; so is one
    whose handshake is not done by then."""
    drain_propagation_s: Seconds = 0.0
    """How long a drain still admits requests after health turned NOT_SERVING, so that balancers can notice."""
    drain_s: Seconds = 30.0
    """How long running requests may go on in a drain."""
    engine_timeout_s: Annotated[float, Meta(ge=2, le=1e6)] = 30.0
    """An engine that has not been heard of for so long is lost; so is one of several front ends. They are heard of each second."""
    engine_restarts: Annotated[int, Meta(ge=0)] = 5
    """A lost engine is started again, after a wait that doubles each time, but no more often than this without a healthy minute between."""


class Security(Section, frozen=True):
    """Who may call, and over what."""

    tls_certificate: str = ""
    """PEM file with the server's certificate chain; with `tls_key`, `server.port` speaks TLS alone."""
    tls_key: str = ""
    tls_client_ca: str = ""
    """PEM file of the authorities whose clients may connect (mTLS). Empty: clients need no certificate."""
    tokens_file: str = ""
    """YAML list of the clients that may call: name, token (or token_sha256), and limits of their own. Empty: whoever reaches the port."""

    def __post_init__(self) -> None:
        if bool(self.tls_certificate) != bool(self.tls_key):
            missing, given = ("tls_key", "tls_certificate") if self.tls_certificate else ("tls_certificate", "tls_key")
            raise ValueError(f"{missing} is missing: {given} is given, and TLS needs both")
        if self.tls_client_ca and not self.tls_certificate:
            raise ValueError("tls_client_ca needs TLS: tls_certificate and tls_key are missing")


class Limits(Section, frozen=True):
    """How much is admitted. What is more is RESOURCE_EXHAUSTED, with when to try again. A limit of 0 is none, if nothing else is said.

    Each of server.workers counts what it has admitted itself.
    """

    max_queued_tokens: CountOrAuto = 0
    """Tokens of prompts that may wait for their turn; one prompt may always. 0: no limit but server.max_queue."""
    max_kv_share: Annotated[float, Meta(gt=0, le=1e6)] = 4.0
    """KV pages that all requests in flight may come to need, if their answers become as long as they may, as a multiple of those there are;
    one request may always."""
    client_key: Annotated[str, Meta(pattern=r"^[0-9A-Za-z_.-]*$")] = ""
    """The metadata key whose value names a client that no token names; those without it are together one client. It proves nothing: who
    must be held to limits needs a token. Empty: clients without tokens have no limits."""
    client_streams: CountOrAuto = 0
    """Calls of one client at once: Generate, Tokenize, Detokenize."""
    client_requests_per_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """On average; those of a second, or one, may come at once. Each choice of a Generate call counts."""
    client_tokens_per_min: CountOrAuto = 0
    """Prompt and answer tokens of one client, on average; those of a minute may come at once. Who has used more is refused until that has
    passed."""
    max_prompt_tokens: CountOrAuto = 0
    """A longer prompt is INVALID_ARGUMENT. 0: what the context and the KV cache hold."""


class Telemetry(Section, frozen=True):
    """Where traces, metrics and logs go."""

    traces: bool = True
    trace_file: str = "traces.jsonl"
    """JSON lines, one a span; used where no OTLP endpoint is set."""
    otlp_endpoint: str = ""
    """An OTLP gRPC receiver, such as http://127.0.0.1:4317. Empty: OTEL_EXPORTER_OTLP_ENDPOINT, else the file. Metrics go there as well."""
    metrics_port: Port | None = None
    """Where /metrics is for Prometheus, over HTTP on all addresses. null: nowhere."""
    log_format: Literal["text", "json"] = "text"
    """json: a line an object, with the trace id of the request that it is about."""
    record_prompts: bool = False
    """Put prompts and answers into the spans. They are nowhere else, and without this not there."""
    flashinfer_log_level: Annotated[int, Meta(ge=0, le=10)] = 0
    """FlashInfer's logging of its API's calls (FLASHINFER_LOGLEVEL): 0 none, 1 names, 3 with arguments, 5 with statistics of tensors."""


class Config(Section, frozen=True):
    """The whole file."""

    model: Model = Model()
    device: Device = Device()
    batch: Batch = Batch()
    cache: Cache = Cache()
    kernels: Kernels = Kernels()
    server: Server = Server()
    security: Security = Security()
    limits: Limits = Limits()
    telemetry: Telemetry = Telemetry()
    loadtest: Loadtest = Loadtest()
    comparison: Comparison = Comparison()

    def __post_init__(self) -> None:
        server, metrics, taken = self.server, self.telemetry.metrics_port or 0, dict[int, str]()
        if metrics and metrics + server.workers > 65536:
            raise ValueError(f"telemetry.metrics_port: {metrics} and the ports after it are too few for {server.workers} server.workers")
        wanted = [("server.port", server.port), ("server.admin_port", server.admin_port), ("server.health_port", server.health_port)]
        wanted += [("telemetry.metrics_port", metrics + worker) for worker in range(server.workers if metrics else 0)]
        for key, port in wanted:
            # Several front ends would share it in silence, and mix up whose calls are whose.
            if port and taken.setdefault(port, key) != key:
                raise ValueError(f"{key}: {port} is that of {taken[port]} too")
        for field in ("client_streams", "client_requests_per_s", "client_tokens_per_min"):
            if getattr(self.limits, field) and not (self.limits.client_key or self.security.tokens_file):
                raise ValueError(f"limits.{field} limits nobody: clients are told apart by limits.client_key or security.tokens_file")


def load_config(path: str | Path | None = None, overrides: list[str] | None = None) -> Config:
    """Read a YAML file (None: the defaults), then set `section.key=value` overrides, whose values are YAML too.

    Raises ConfigError, which names the file and the key.
    """
    tree = _read_yaml(Path(path)) if path else {}
    for override in overrides or []:
        _set(tree, override)
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'configuration'}: {readable(error)}") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 takes 1e-6 for a string, since it has no dot; here it is the number that was meant."""


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789"))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file must hold sections, such as `model:`")
    return {key: {} if section is None else section for key, section in tree.items()}


def _set(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    *sections, leaf = key.split(".")
    if not equals or not sections or not leaf:
        raise ConfigError(f"override {override!r}: write section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
    node: Any = tree
    for section in sections:
        node = node.setdefault(section, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {section!r} is not a section")
    node[leaf] = "" if value is None else value
