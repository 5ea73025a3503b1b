"""`inference-service size`: whether a model fits a GPU, and what is left for requests. It needs its config.json alone, and no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from inference_service.config import Config, ConfigError, Kernels
from inference_service.execution.device import find_dtype
from inference_service.execution.loading import apply_config
from inference_service.execution.memory import GIB, Needs, page_bytes
from inference_service.fetch import resolve_model
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import Setting, dtype_name
from inference_service.models.build import Build
from inference_service.models.config import ModelConfig
from inference_service.models.families import make_model, read_config


@dataclass(frozen=True)
class Gpu:
    """A GPU: what it is called, its architecture as the support table writes it, and the memory that CUDA finds on it."""

    name: str
    architecture: str
    memory_gib: float


GPUS = {
    "a10g": Gpu("NVIDIA A10G", "sm_86", 21.9),
    "a100": Gpu("NVIDIA A100 80GB", "sm_80", 79.1),
    "a100-40gb": Gpu("NVIDIA A100 40GB", "sm_80", 39.3),
    "b200": Gpu("NVIDIA B200", "sm_100", 178.3),
    "h100": Gpu("NVIDIA H100 80GB", "sm_90", 79.1),
    "h200": Gpu("NVIDIA H200", "sm_90", 139.8),
    "l4": Gpu("NVIDIA L4", "sm_89", 21.9),
    "l40s": Gpu("NVIDIA L40S", "sm_89", 44.3),
    "t4": Gpu("NVIDIA T4", "sm_75", 14.5),
}
"""By the name that `--gpu` takes. Less than what is sold: the driver and error correction keep a part."""

CODE_GIB = 1.5
"""What CUDA, the kernels' code and their workspaces are reckoned to need."""
GRAPHS_GIB = 1.0
CONTEXTS = (1024, 4096, 16384, 65536)
"""Tokens of a request for which the table says how many fit at once."""


@dataclass(frozen=True)
class Size:
    """Where a GPU's memory goes; all but the weights and the bytes of a token are estimates."""

    memory: int
    weights: int
    other: int
    """Code, graphs and activations, in bytes."""
    token_bytes: int
    """Of a token in the KV cache, in all layers together."""
    kv_tokens: int
    max_context: int
    max_requests: int

    def concurrency(self, context: int) -> int:
        """Requests of so many tokens, prompt and answer, that are computed at once without preemption."""
        return min(self.max_requests, self.kv_tokens // context)


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError, which lists the names there are."""
    if name not in GPUS:
        raise ConfigError(f"--gpu: there is no {name!r}, but {', '.join(GPUS)}; for another one give --memory-gib")
    return GPUS[name]


def estimate(config: Config, memory_gib: float) -> Size:
    """Raises ConfigError where not one request of model.max_context fits, ModelError for a model that is not served."""
    shape = apply_config(read_config(resolve_model(config.model.path)), config)
    dtype = find_dtype(config, torch.device("cuda"), shape.dtype)
    weights = count_parameters(shape, dtype) * dtype.itemsize
    needs = Needs(
        total=int(memory_gib * GIB),
        others=0,
        loaded=weights + int(CODE_GIB * GIB),
        graphs=int(GRAPHS_GIB * GIB),
        activations=_activations(config, shape, dtype),
    )
    size = page_bytes(config, shape, dtype)
    kv_tokens = needs.pages(config, size) * config.cache.page_size
    if kv_tokens < shape.max_context:
        raise ConfigError(
            f"model.max_context: the {kv_tokens:,} tokens that fit into the KV cache are no request of {shape.max_context:,}; "
            + needs.ledger(kv_tokens // config.cache.page_size * size)
        )
    other = needs.loaded + needs.graphs + needs.activations - weights
    if weights + other + (pool := kv_tokens // config.cache.page_size * size) > needs.total:
        raise ConfigError(f"cache.pages: {config.cache.pages} do not fit; {needs.ledger(pool)}")
    return Size(needs.total, weights, other, size // config.cache.page_size, kv_tokens, shape.max_context, config.batch.max_requests)


def count_parameters(shape: ModelConfig, dtype: torch.dtype) -> int:
    """Of the model itself, built without memory for its weights."""
    setting = Setting("x86_64", dtype, shape.head_dim, shape.heads // shape.kv_heads, 16)
    build = Build(make_operators(select(Kernels(), setting)), dtype, torch.device("meta"))
    return sum(weight.numel() for weight in make_model(build, shape).weights().values())


def _activations(config: Config, shape: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the largest step's widest layer, and of its logits, which are sampled in float32."""
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    mlp = 3 * shape.intermediate_size
    if moe := shape.moe:
        mlp = moe.top_k * (3 * moe.intermediate_size + shape.hidden_size) + 3 * moe.shared_size
    layer = (4 * shape.hidden_size + attention + mlp) * dtype.itemsize
    logits = shape.vocab_size * (dtype.itemsize + 2 * torch.float32.itemsize)
    return config.batch.step_tokens * layer + config.batch.max_requests * logits


def print_size(config: Config, gpu: str | None, memory_gib: float | None) -> None:
    """Print it for a GPU of GPUS, or for any other by its memory. Raises as `estimate` does."""
    memory_gib = memory_gib or find_gpu(gpu or "").memory_gib
    size = estimate(config, memory_gib)
    shape = read_config(resolve_model(config.model.path))
    kv_bytes = size.kv_tokens * size.token_bytes

    memory = Table("memory", "GiB", title=f"{shape.architecture} in {dtype_name(find_dtype(config, torch.device('cuda'), shape.dtype))}")
    memory.columns[1].justify = "right"
    for name, amount in {
        GPUS[gpu].name if gpu else "GPU": size.memory,
        "weights": size.weights,
        "code, graphs, activations (estimated)": size.other,
        f"KV cache: {size.kv_tokens:,} tokens of {size.token_bytes:,} bytes": kv_bytes,
        "left free": size.memory - size.weights - size.other - kv_bytes,
    }.items():
        memory.add_row(name, f"{amount / GIB:.1f}")

    at_once = Table("tokens of a request", "requests at once", title=f"Concurrency, at most {size.max_requests}")
    for context in sorted({*(each for each in CONTEXTS if each < size.max_context), size.max_context}):
        at_once.add_row(f"{context:,}", str(size.concurrency(context)))
    Console(highlight=False).print(memory, at_once, sep="\n\n")
