"""How many KV pages there are: on a CPU by the memory given, on a GPU by what is left of it."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass

import torch

from inference_service.config import Config, ConfigError
from inference_service.kernels.fp8 import E4M3
from inference_service.models.config import ModelConfig

MIB, GIB = 1 << 20, 1 << 30
SLACK = 0.02
"""Of a GPU's memory, what stays free beside all processes: each takes a little more after its start."""
OUTSIDE_BYTES = 4 * GIB
"""What a process takes at most that PyTorch does not know of: CUDA's context, kernels' code, and workspaces outside of its pool."""


def cache_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    """Of keys and values, where the model's is `dtype`."""
    return E4M3 if config.cache.dtype == "fp8" else dtype


def page_bytes(config: Config, shape: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a page in all layers together."""
    return shape.layers * math.prod(shape.page_shape(config.cache.page_size)) * cache_dtype(config, dtype).itemsize


def cpu_pages(config: Config, shape: ModelConfig, dtype: torch.dtype) -> int:
    """Pages of a cache in the host's memory. Raises ConfigError where not one fits."""
    if config.cache.pages:
        return config.cache.pages
    size = page_bytes(config, shape, dtype)
    pages = int(config.cache.memory_gib * GIB) // size
    if not pages:
        raise ConfigError(f"cache.memory_gib: {config.cache.memory_gib} GiB hold no page of {size:,} bytes")
    return pages


def used_bytes() -> int:
    """What is taken of the GPU's memory, by whomever, once PyTorch has given back what it only keeps."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def own_bytes(grown: int, held: int) -> int:
    """How much of what a GPU's used memory has grown by is this process's, of which PyTorch holds `held` bytes.

    The rest is of other processes: one that has ended meanwhile lessens what is used, one that has started adds to it.
    """
    return min(max(grown, held, 0), held + OUTSIDE_BYTES)


@dataclass(frozen=True)
class Needs:
    """Bytes that a GPU needs beside the KV pool."""

    total: int
    """All that the GPU has."""
    others: int
    """What other processes have of it."""
    loaded: int
    """Weights, and the kernels' code and workspaces."""
    graphs: int
    activations: int

    def pages(self, config: Config, page_bytes: int) -> int:
        """Pages that fit into this process's share of the GPU, and beside the others. Raises ConfigError where not one does."""
        if config.cache.pages:
            return config.cache.pages
        share_bytes = min(int(config.cache.gpu_memory_fraction * self.total), int((1 - SLACK) * self.total) - self.others)
        left = share_bytes - self.loaded - self.graphs - self.activations
        if left < page_bytes:
            share = f"{config.cache.gpu_memory_fraction} of {self.total / GIB:.1f} GiB"
            raise ConfigError(f"cache.gpu_memory_fraction: {share} leaves no room for a KV page; {self.ledger(0)}")
        return left // page_bytes

    def ledger(self, pool: int) -> str:
        """Where the GPU's memory goes, in GiB."""
        entries = {"weights and code": self.loaded, "graphs": self.graphs, "activations": self.activations, "KV pool": pool}
        entries |= {"other processes": self.others, "free": self.total - self.others - sum(entries.values())}
        return f"memory of {self.total / GIB:.1f} GiB: " + ", ".join(f"{name} {size / GIB:.2f}" for name, size in entries.items())
