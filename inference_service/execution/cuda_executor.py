"""The executor for CUDA: steps are queued on one stream, and the host waits for nothing but ids that somebody asks for.

Steps of decodes, and short ones with prefill chunks, replay a CUDA graph; long prefills, log-probabilities and changed logits run eagerly
through the same model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from inference_service.config import Config
from inference_service.engine.step import Row, StepPlan, StepResult, Ticket
from inference_service.execution.edits import LogitEdits, gather_edits
from inference_service.execution.expert_count import ExpertCounter
from inference_service.execution.graphs import StepGraphs, StepRunner, decode_sizes, mixed_sizes
from inference_service.execution.loading import LoadedModel
from inference_service.execution.logprobs import PromptRows, gather_prompt, score_prompt, to_logprobs, to_prompt_logprobs
from inference_service.execution.memory import cache_dtype
from inference_service.execution.packed_inputs import PackedStep, Sizes, SlotTable, device_fields
from inference_service.execution.page_copies import copy_pages
from inference_service.execution.sampler import sample
from inference_service.kernels.compiles import compile_counter
from inference_service.messages import Sampling

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
IN_FLIGHT = 4
"""Steps that may be launched and not yet read."""
MIXED_WORK = 512 * 1024
"""Tokens times context of all prefill chunks of a step: above, the attention of eager steps wins more than launches cost."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of a step, in page-locked memory once the step has run: of drawn tokens, and of a prompt's."""

    drawn: list[Tensor] = field(default_factory=list)
    prompt: list[Tensor] = field(default_factory=list)
    prompt_rows: PromptRows | None = None


@dataclass(eq=False)
class CudaTicket:
    """A launched step. What comes back lands in page-locked memory of the ticket's own."""

    event: torch.cuda.Event
    ids_N: Tensor
    alternatives: list[int]
    scores: Scores
    distinct_experts: Tensor | None = None
    result: StepResult | None = None

    def ended(self, timeout_s: float) -> bool:
        """Waits for the device however long it takes: one that hangs keeps the engine silent, and so is noticed."""
        self.event.synchronize()
        return True

    def wait(self) -> StepResult:
        if self.result is None:
            self.event.synchronize()
            prompt_logprobs = to_prompt_logprobs(self.scores.prompt_rows, self.scores.prompt)
            distinct = None if self.distinct_experts is None else self.distinct_experts.item()
            self.result = StepResult(self.ids_N.tolist(), to_logprobs(self.alternatives, self.scores.drawn), prompt_logprobs, distinct)
        return self.result


class Staging:
    """Page-locked memory for one step in flight: its inputs, and its ids. Free once its ticket has been waited for."""

    def __init__(self, block_bytes: int, max_requests: int) -> None:
        self.block = torch.zeros(block_bytes, dtype=torch.uint8, pin_memory=True)
        self.bytes = self.block.numpy()
        self.ids_N = torch.zeros(max_requests, dtype=torch.int64, pin_memory=True)
        self.distinct_experts = torch.zeros((), pin_memory=True)
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.ticket: CudaTicket | None = None


class CudaExecutor:
    """Queues steps in the order of their launch."""

    def __init__(self, config: Config, loaded: LoadedModel, pages: int, stream: torch.cuda.Stream) -> None:
        page_size, max_requests = config.cache.page_size, config.batch.max_requests
        caches = loaded.model.new_cache(pages, page_size, loaded.target.device, cache_dtype(config, loaded.dtype))
        self.info = loaded.info(pages)
        self._stream, self._step_tokens = stream, config.batch.step_tokens
        self._slots = SlotTable(max_requests, -(-loaded.shape.max_context // page_size), page_size)
        largest = Sizes(config.batch.step_tokens, max_requests, max_requests, self._slots.max_pages)
        self._runner = StepRunner(loaded.model, caches, max_requests, largest.bytes, loaded.target.device)
        self._editor = LogitEdits(self._runner.last_token_id_S)
        self._graphs = StepGraphs(self._runner, self._slots)
        self._ring = [Staging(largest.bytes, max_requests) for _ in range(IN_FLIGHT)]
        self._counter = ExpertCounter(loaded.shape.moe.experts if loaded.shape.moe else 0)
        self._launched = self._compiles_before = self._fused_before = 0

    def launch(self, plan: StepPlan) -> Ticket:
        rows = plan.rows
        exact = self._slots.measure(rows)
        plain = all(row.known_plain or row.is_plain for row in rows)
        graph = self._graph(rows, exact) if plain else None
        staging = self._next_staging()
        with self._on_stream():
            if plan.copies:
                copy_pages(self._runner.caches, plan.copies)
            step = self._upload(rows, graph or exact, staging)
            scores, distinct = Scores(), None
            if graph:
                captured = self._graphs.replay(step)
                ids_N = captured.ids_N
                if self._counter.wants(not graph.mixed):
                    distinct = staging.distinct_experts.copy_(self._counter.count(captured.chosen_experts, exact.tokens), non_blocking=True)
            elif plain:
                ids_N = self._run(step)
            else:
                ids_N, scores = self._run_edited(rows, step)
            ids_N = staging.ids_N[: exact.samples].copy_(ids_N[: exact.samples], non_blocking=True)
            staging.event.record()
        alternatives = [row.logprobs for row in rows if row.samples]
        staging.ticket = CudaTicket(staging.event, ids_N, alternatives, scores, distinct)
        return staging.ticket

    def _graph(self, rows: list[Row], exact: Sizes) -> Sizes | None:
        """The inputs of the graph that computes a step; None: it must run eagerly."""
        mixed = bool(rows[-1].token_ids)
        graph = self._graphs.sizes(replace(exact, mixed=True) if mixed else exact)
        if graph is None:
            return None
        if mixed and sum(row.length * row.position for row in rows if row.token_ids) > MIXED_WORK:
            return None
        return graph

    def _run(self, step: PackedStep) -> Tensor:
        """Compute a step eagerly, and give ids_N."""
        fields = device_fields(self._runner.block, step.sizes)
        logits_NV = self._runner.logits(step, fields)
        return self._runner.draw(logits_NV, step, fields) if step.sizes.samples else fields.slots_N

    def _run_edited(self, rows: list[Row], step: PackedStep) -> tuple[Tensor, Scores]:
        """The same where a row is not plain: also gives what the rows that want log-probabilities get."""
        runner, fields = self._runner, device_fields(self._runner.block, step.sizes)
        prompt_rows = gather_prompt(rows, pin=True)
        prompt_scores: list[Tensor] = []
        if prompt_rows:
            hidden_TC = runner.hidden(step, fields, None)
            prompt_scores = score_prompt(hidden_TC, runner.model.logits, prompt_rows)
            logits_NV = runner.model.logits(hidden_TC.index_select(0, fields.last_N))
        else:
            logits_NV = runner.logits(step, fields)
        if not step.sizes.samples:
            return fields.slots_N, Scores([], _to_host(prompt_scores), prompt_rows)
        sampling = [row for row in rows if row.samples]
        scored = [index for index, row in enumerate(sampling) if row.logprobs >= 0]
        scored_Y = torch.tensor(scored, dtype=torch.int64, pin_memory=True).to(logits_NV.device, non_blocking=True)
        ids_N, scores = sample(
            logits_NV,
            scored_Y,
            [row.logprobs for row in sampling],
            gather_edits(sampling, pin=True),
            self._editor,
            lambda edited_NV: runner.draw(edited_NV, step, fields),
        )
        return ids_N, Scores(_to_host(scores), _to_host(prompt_scores), prompt_rows)

    def _upload(self, rows: list[Row], sizes: Sizes, staging: Staging) -> PackedStep:
        step = self._slots.write(rows, sizes, staging.bytes)
        count = sizes.bytes
        self._runner.block[:count].copy_(staging.block[:count], non_blocking=True)
        return step

    def _next_staging(self) -> Staging:
        staging = self._ring[self._launched % IN_FLIGHT]
        self._launched += 1
        if staging.ticket:
            staging.ticket.wait()
        return staging

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            yield

    def close(self) -> None:
        """Let launched steps end, and let go of what they use."""
        self._stream.synchronize()
        self._ring.clear()
        del self._graphs, self._runner, self._editor

    @property
    def compiles(self) -> int:
        return compile_counter().count - self._compiles_before

    @property
    def fused_steps(self) -> int:
        fused = self._runner.model.operators.attention.fused
        return sum(form.steps for form in fused.forms()) - self._fused_before if fused else 0

    # --- start ---

    def count_compiles(self) -> None:
        """Count from now on: all that a request may meet has been run."""
        self._compiles_before = compile_counter().count
        self._fused_before += self.fused_steps

    def graph_sizes(self, mixed: bool) -> list[Sizes]:
        """The inputs of each graph to capture, be it of decodes alone or (`mixed`) of prefill chunks too."""
        sizes = decode_sizes(self._slots.padding, self._slots)
        return sizes + mixed_sizes(self._slots.padding, self._step_tokens, self._slots) if mixed else sizes

    def capture(self, sizes: list[Sizes]) -> int:
        """Capture graphs of steps with these inputs, and tell how many."""
        with self._on_stream():
            self._graphs.capture(sizes, lambda each: self._upload([], each, self._next_staging()))
            self._stream.synchronize()
        return len(self._graphs)

    def drop_graphs(self) -> None:
        self._graphs = StepGraphs(self._runner, self._slots)

    def try_fused(self) -> None:
        """Compute a step by each form that attends to decodes and chunks at once, so that it is loaded and has its memory, whatever steps
        it is chosen for."""
        attention, decodes = self._runner.model.operators.attention, min(3, self._slots.padding - 1)
        chosen = attention.fused
        for form in chosen.forms() if chosen and decodes else []:
            attention.fused = form
            self.prefill(min(self._step_tokens, self.info.max_context) - decodes, decodes, logprobs=1)
        attention.fused = chosen

    def prefill(self, tokens: int, decodes: int = 0, sampling: Sampling = GREEDY, logprobs: int = -1) -> None:
        """Compute a step of so many prefill tokens beside so many decodes, whatever it does to the cache, which nobody uses yet."""
        size, vocabulary, used = self._slots.page_size, self.info.vocab_size, decodes
        rows = [Row(slot, size - 1, 1, [], [slot], True, sampling) for slot in range(decodes)]
        while tokens and len(rows) < self._slots.padding and used < self.info.pages:
            length = min(tokens, self.info.max_context, (self.info.pages - used) * size)
            pages = list(range(used, used - (-length // size)))
            rows.append(Row(len(rows), 0, length, [token % vocabulary for token in range(length)], pages, True, sampling, logprobs))
            used, tokens = used + len(pages), tokens - length
        self.launch(StepPlan(rows)).wait()


def _to_host(scores: list[Tensor]) -> list[Tensor]:
    """Copies that are there once the stream gets there."""
    return [torch.empty(score.shape, dtype=score.dtype, pin_memory=True).copy_(score, non_blocking=True) for score in scores]
