"""The executor for any device of PyTorch's: runs steps one after the other on a thread of its own."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from inference_service.config import Config
from inference_service.engine.step import Executor, ExecutorInfo, StepPlan, StepResult, Ticket
from inference_service.execution.batch import InputBuffers, Step, pack
from inference_service.execution.device import find_device
from inference_service.execution.edits import LogitEdits
from inference_service.execution.expert_count import ExpertCounter
from inference_service.execution.loading import Report, load_model
from inference_service.execution.logprobs import score_prompt, to_logprobs, to_prompt_logprobs
from inference_service.execution.memory import cache_dtype, cpu_pages
from inference_service.execution.page_copies import copy_pages
from inference_service.execution.sampler import sample
from inference_service.models.decoder import Decoder

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

    compiles = fused_steps = 0

    def __init__(self, model: Decoder, caches: list[Tensor], buffers: InputBuffers, info: ExecutorInfo, worker: ThreadPoolExecutor) -> None:
        self.info = info
        self._model, self._caches, self._buffers = model, caches, buffers
        self._editor = LogitEdits(buffers.last_token_id_S)
        self._page_size = caches[0].shape[3]
        self._counter = ExpertCounter(model.config.moe.experts if model.config.moe else 0)
        self._worker = worker

    def launch(self, plan: StepPlan) -> Ticket:
        return StepTicket(self._worker.submit(self._run, pack(plan, self._page_size), list(plan.copies)))

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _run(self, packed: Step, copies: list[tuple[int, int]]) -> StepResult:
        if copies:
            copy_pages(self._caches, copies)
        step, model = self._buffers.fill(packed), self._model
        tensors = step.tensors
        last_N = None if step.all_sample or step.prompt else tensors.last_N
        hidden_NC = model.hidden(tensors.token_ids_T, step.layout(), self._caches, last_N)
        prompt_scores: list[Tensor] = []
        if step.prompt:
            prompt_scores = score_prompt(hidden_NC, model.logits, step.prompt)
            hidden_NC = hidden_NC.index_select(0, tensors.last_N)
        prompt_logprobs = to_prompt_logprobs(step.prompt, prompt_scores)
        if not step.samples:
            return StepResult([], [], prompt_logprobs)
        ids_N, scores = sample(
            model.logits(hidden_NC),
            tensors.scored_Y,
            step.alternatives,
            step.edits,
            self._editor,
            lambda logits_NV: model.operators.sampling(logits_NV, step.draws()),
        )
        self._buffers.last_token_id_S.index_copy_(0, tensors.slots_N, ids_N)
        distinct = None
        if self._counter.wants(step.decodes == len(step.lengths)):
            distinct = self._counter.count(model.take_chosen_experts(), step.decodes).item()
        return StepResult(ids_N.tolist(), to_logprobs(step.alternatives, scores), prompt_logprobs, distinct)


def build_executor(config: Config, model_dir: Path, progress: Report) -> Executor:
    """Load the model and size its cache; `progress` is told each step and each derived number.

    Raises ConfigError or ModelError, which name the key, or the file and the tensor.
    """
    if find_device(config).device.type == "cuda":
        from inference_service.execution.cuda_start import build_cuda_executor

        return build_cuda_executor(config, load_model(config, model_dir, progress), progress)
    # All that computes, loading included, runs on this thread. OpenMP keeps a team for each thread that computes, and with more threads
    # than cores in all its teams it puts them to sleep between operations: a decode step takes half as long again.
    worker = ThreadPoolExecutor(1, "executor", initializer=_start_worker, initargs=(config.device.threads,))
    try:
        return worker.submit(_build, config, model_dir, progress, worker).result()
    except BaseException:
        worker.shutdown()
        raise


def _build(config: Config, model_dir: Path, progress: Report, worker: ThreadPoolExecutor) -> TorchExecutor:
    loaded = load_model(config, model_dir, progress)
    shape, page_size = loaded.shape, config.cache.page_size
    pages = cpu_pages(config, shape, loaded.dtype)
    progress(f"KV cache: {pages:,} pages of {page_size} tokens, {pages * page_size:,} tokens")
    caches = loaded.model.new_cache(pages, page_size, loaded.target.device, cache_dtype(config, loaded.dtype))
    buffers = InputBuffers(config.batch.max_requests, config.batch.step_tokens, -(-shape.max_context // page_size), loaded.target.device)
    return TorchExecutor(loaded.model, caches, buffers, loaded.info(pages), worker)


def _start_worker(threads: int) -> None:
    """The number of OpenMP threads belongs to the thread that starts them, and so does their priority: on a CPU the front end, which has
    little to do but must do it at once, goes before the computing."""
    os.nice(COMPUTE_NICE)
    if threads:
        torch.set_num_threads(threads)
