"""The executor: builds the model and its cache, and runs steps one after the other on a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from inference_service.config import Config, ConfigError
from inference_service.engine.step import Executor, ExecutorInfo, StepPlan, StepResult, Ticket
from inference_service.execution.batch import InputBuffers, Step, pack
from inference_service.execution.device import find_device, find_dtype
from inference_service.execution.sampler import sample, to_logprobs
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import dtype_name
from inference_service.models.checkpoint import load_checkpoint
from inference_service.models.config import ModelConfig
from inference_service.models.decoder import Decoder
from inference_service.models.dummy import fill_dummy
from inference_service.models.families import make_model, read_config
from inference_service.models.layers import Build

GIB = 1 << 30
COMPUTE_NICE = 5


@dataclass(frozen=True)
class StepTicket:
    """A launched step."""

    future: Future[StepResult]

    def ended(self, timeout_s: float) -> bool:
        return bool(wait([self.future], timeout_s).done)

    def wait(self) -> StepResult:
        return self.future.result()


class TorchExecutor:
    """Runs steps in the order of their launch, on a single thread, which is the only one that touches tensors on the device."""

    def __init__(self, model: Decoder, caches: list[Tensor], buffers: InputBuffers, info: ExecutorInfo, threads: int) -> None:
        self.info = info
        self._model, self._caches, self._buffers = model, caches, buffers
        self._page_size = caches[0].shape[3]
        self._worker = ThreadPoolExecutor(1, "executor", initializer=_start_worker, initargs=(threads,))

    def launch(self, plan: StepPlan) -> Ticket:
        return StepTicket(self._worker.submit(self._run, pack(plan, self._page_size)))

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _run(self, packed: Step) -> StepResult:
        step = self._buffers.fill(packed)
        last_N = None if step.all_sample else step.tensors.last_N
        logits_NV = self._model.forward(step.tensors.token_ids_T, step.layout(), self._caches, last_N)
        if not step.samples:
            return StepResult([], [])
        ids_N, scores = sample(logits_NV, step, self._model.operators.sampling)
        self._buffers.last_token_id_S.index_copy_(0, step.tensors.slots_N, ids_N)
        return StepResult(ids_N.tolist(), to_logprobs(step, scores))


def build_executor(config: Config, model_dir: Path, progress: Callable[[str], None]) -> Executor:
    """Load the model and size its cache; `progress` is told each step and each derived number.

    Raises ConfigError or ModelError, which name the key, or the file and the tensor.
    """
    _set_threads(config.device.threads)
    target = find_device(config)
    shape = limit_context(read_config(model_dir), config)
    dtype = find_dtype(config, target.device, shape.dtype)
    choices = select(config.kernels, target.architecture, dtype)
    for choice in choices:
        progress(f"kernel {choice.row.operator}: {choice.row.backend} ({choice.reason})")
    progress(f"{shape.architecture} in {dtype_name(dtype)} on {target.name} ({target.architecture}), {torch.get_num_threads()} threads")

    model = make_model(Build(make_operators(choices), dtype, target.device), shape)
    weights = model.weights()
    parameters = sum(weight.numel() for weight in weights.values())
    progress(f"loading {parameters / 1e6:,.1f} M parameters ({'random' if config.model.load_format == 'dummy' else model_dir})")
    if config.model.load_format == "dummy":
        fill_dummy(weights)
    else:
        load_checkpoint(model_dir, weights, shape.tied_embeddings)
    weights.clear()
    model.pack()

    pages = cache_pages(config, shape, dtype)
    progress(f"KV cache: {pages:,} pages of {config.cache.page_size} tokens, {pages * config.cache.page_size:,} tokens")
    caches = model.new_cache(pages, config.cache.page_size, target.device)
    max_pages = -(-shape.max_context // config.cache.page_size)
    buffers = InputBuffers(config.batch.max_requests, config.batch.step_tokens, max_pages, target.device)
    info = ExecutorInfo(
        architecture=shape.architecture,
        dtype=dtype_name(dtype),
        parameters=parameters,
        vocab_size=shape.vocab_size,
        max_context=shape.max_context,
        device=target.name,
        device_arch=target.architecture,
        pages=pages,
        kernels=[choice.message() for choice in choices],
    )
    return TorchExecutor(model, caches, buffers, info, config.device.threads)


def _start_worker(threads: int) -> None:
    """The number of OpenMP threads belongs to the thread that starts them, and so does their priority: on a CPU the front end, which has
    little to do but must do it at once, goes before the computing."""
    os.nice(COMPUTE_NICE)
    _set_threads(threads)


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def limit_context(shape: ModelConfig, config: Config) -> ModelConfig:
    """The shape with the configured context. Raises ConfigError for more than the model declares."""
    wanted = config.model.max_context
    if wanted > shape.max_context:
        raise ConfigError(f"model.max_context: {wanted} is more than the {shape.max_context} that the model declares")
    return replace(shape, max_context=wanted) if wanted else shape


def cache_pages(config: Config, shape: ModelConfig, dtype: torch.dtype) -> int:
    """KV pages: as configured, else as many as the memory holds. Raises ConfigError where that is none."""
    if config.cache.pages:
        return config.cache.pages
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize
    pages = int(config.cache.memory_gib * GIB) // (token_bytes * config.cache.page_size)
    if not pages:
        raise ConfigError(f"cache.memory_gib: {config.cache.memory_gib} GiB hold no page of {token_bytes * config.cache.page_size:,} bytes")
    return pages
