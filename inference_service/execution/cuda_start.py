"""The start on a GPU: learn what graphs and activations need, give the KV pool what is left, then capture and warm up."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from msgspec.structs import replace

from inference_service.config import Config
from inference_service.execution.cuda_executor import GREEDY, CudaExecutor
from inference_service.execution.deep_gemm import load_deep_gemm
from inference_service.execution.device import find_setting
from inference_service.execution.loading import LoadedModel, Report
from inference_service.execution.memory import GIB, MIB, Needs, own_bytes, page_bytes, used_bytes
from inference_service.execution.packed_inputs import Sizes
from inference_service.execution.tuning import describe, load_tuning
from inference_service.kernels.flashinfer_fa3 import LEAST_TOKENS
from inference_service.kernels.selection import captures_mixed, keeps_from_graph, multiplies_by_cutlass
from inference_service.messages import Sampling

RANDOM = Sampling(1.0, 50, 0.9, 0.01, 0)
SMALL_GRAPH_BYTES = 8 * MIB
"""What each graph but the largest is reckoned to need, since it finds room for its tensors in the largest one's memory."""
MANY_DECODES = 8
"""More than any backend that chooses by the number of decodes takes for few."""


def build_cuda_executor(config: Config, loaded: LoadedModel, progress: Report) -> CudaExecutor:
    """The executor with all that a request may meet loaded, captured and run once. Raises ConfigError where memory does not suffice."""
    _load_tactics(config, loaded, progress)
    load_deep_gemm(loaded, config.batch.step_tokens, progress)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    obstacles = keeps_from_graph(loaded.choices)
    mixed = captures_mixed(loaded.choices)

    def graph_sizes(executor: CudaExecutor) -> list[Sizes]:
        return [] if obstacles else executor.graph_sizes(mixed)

    progress("learning how much memory steps and graphs take")
    needs = _learn_needs(config, loaded, graph_sizes, stream)
    page_size, size = config.cache.page_size, page_bytes(config, loaded.shape, loaded.dtype)
    pages = needs.pages(config, size)
    progress(needs.ledger(pages * size))
    progress(f"KV cache: {pages:,} pages of {page_size} tokens, {pages * page_size:,} tokens")
    executor = CudaExecutor(config, loaded, pages, stream)

    begin, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    if sizes := graph_sizes(executor):
        count = executor.capture(sizes)
        used = (free - torch.cuda.mem_get_info()[0]) / GIB
        progress(
            f"{count} graphs captured in {time.perf_counter() - begin:.1f} s and {used:.2f} GiB (reckoned with: {needs.graphs / GIB:.2f}), "
            f"for batches of {_sorted_tokens(sizes, False)}, with prefill chunks for {_sorted_tokens(sizes, True)} tokens"
        )
    else:
        progress(f"no graphs, because of {', '.join(f'{choice.row.operator} by {choice.row.backend}' for choice in obstacles)}")
    begin = time.perf_counter()
    _warm_up(executor, config)
    progress(f"warmed up in {time.perf_counter() - begin:.1f} s; {torch.cuda.mem_get_info()[0] / GIB:.2f} GiB are free")
    executor.count_compiles()
    return executor


def _load_tactics(config: Config, loaded: LoadedModel, progress: Report) -> None:
    """What `prebuild` measured of the experts' kernels."""
    if not multiplies_by_cutlass(loaded.choices):
        return
    from inference_service.kernels.expert_tactics import expert_tactics

    setting = find_setting(config, loaded.target, loaded.shape, loaded.dtype)
    tuning = load_tuning(describe(loaded.target, setting, loaded.shape))
    if tuning and tuning.expert_tactics:
        expert_tactics().use(tuning.expert_tactics)
        progress(f"the experts' kernels run as tuned for {', '.join(map(str, tuning.expert_tactics))} tokens")
    else:
        progress("the experts' kernels run untuned: `prebuild` tunes them")


def _learn_needs(
    config: Config, loaded: LoadedModel, graph_sizes: Callable[[CudaExecutor], list[Sizes]], stream: torch.cuda.Stream
) -> Needs:
    """Run the largest step of each kind against a pool just large enough, and see what it takes."""
    batch, page_size = config.batch, config.cache.page_size
    trial = CudaExecutor(config, loaded, batch.max_requests - (-batch.step_tokens // page_size), stream)
    trial.try_fused()
    # What is taken once, by the first step that needs it, is no activation.
    trial.prefill(min(LEAST_TOKENS, batch.step_tokens))
    used_bytes()
    reserved = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    trial.prefill(batch.step_tokens)
    trial.prefill(batch.step_tokens, sampling=RANDOM)
    activations = torch.cuda.max_memory_reserved() - reserved

    sizes = graph_sizes(trial)
    largest = {each.mixed: each for each in sorted(sizes, key=lambda each: each.tokens)}
    captured = trial.capture(list(largest.values()))
    with_graphs, held_with_graphs = used_bytes(), torch.cuda.memory_reserved()
    trial.drop_graphs()
    graphs = own_bytes(with_graphs - used_bytes(), held_with_graphs - torch.cuda.memory_reserved())
    graphs += SMALL_GRAPH_BYTES * (2 * len(sizes) - captured)
    trial.close()
    del trial
    used, held = used_bytes(), torch.cuda.memory_reserved()
    ours = own_bytes(used - loaded.taken_bytes, held)
    return Needs(torch.cuda.mem_get_info()[1], used - ours, ours, graphs, activations)


def _sorted_tokens(sizes: list[Sizes], mixed: bool) -> list[int]:
    return sorted({each.tokens for each in sizes if each.mixed is mixed})


def _warm_up(executor: CudaExecutor, config: Config) -> None:
    """Meet what a first request would: prefills of odd and even length, alone and beside decodes, greedy and sampled; with
    log-probabilities too, which make steps run eagerly that a graph would compute, and with changed logits, which are float32."""
    batch = config.batch
    decodes = min(3, batch.max_requests - 1)
    # Own kernels for some dozens of tokens are compiled for ranges of their number, whose ends are a factor of 2 apart or more.
    doubled = {3 << doublings for doublings in range(6)}
    lengths = {1, 17, 128, 500, 1024, batch.prefill_tokens, batch.step_tokens} | doubled
    for length in sorted(length for length in lengths if length <= batch.step_tokens):
        for logprobs in (-1, 1):
            executor.prefill(length, logprobs=logprobs)
            if length + decodes <= batch.step_tokens:
                executor.prefill(length, decodes, logprobs=logprobs)
    for logprobs in (-1, 1):
        executor.prefill(1, 0, RANDOM, logprobs)
        if batch.step_tokens > decodes:
            executor.prefill(1, decodes, RANDOM, logprobs)
    # Eagerly, the kernels that are for many decodes.
    if batch.step_tokens > (many := min(MANY_DECODES, batch.max_requests - 1, executor.info.pages - 1)):
        executor.prefill(1, many, logprobs=1)
    for sampling in (GREEDY, RANDOM):
        executor.prefill(1, 0, replace(sampling, logit_bias=[(0, 1.0)]))
