"""A step on the GPU, and its CUDA graphs: one replay computes a whole step, sampling and the next step's inputs included.

Shapes: T tokens, R rows, N rows that sample, S slots, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_service.execution.packed_inputs import Fields, PackedStep, Sizes, SlotTable, device_fields
from inference_service.models.decoder import Decoder


class StepRunner:
    """The model with its cache, and the fixed memory on the device: the block of inputs, and each slot's last token."""

    def __init__(self, model: Decoder, caches: list[Tensor], max_requests: int, block_bytes: int, device: torch.device) -> None:
        self.model, self.caches = model, caches
        self.block = torch.zeros(block_bytes, dtype=torch.uint8, device=device)
        self.last_token_id_S = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)

    def logits(self, step: PackedStep, fields: Fields) -> Tensor:
        """Compute the step's tokens, and give logits_NV."""
        every = not step.sizes.mixed and step.sizes.samples == step.sizes.tokens
        return self.model.logits(self.hidden(step, fields, None if every else fields.last_N))

    def hidden(self, step: PackedStep, fields: Fields, last_N: Tensor | None) -> Tensor:
        """Compute the step's tokens, and give what logits are made of: of all tokens, or those in `last_N`."""
        last_token_id_T = self.last_token_id_S.index_select(0, fields.slots_R.index_select(0, fields.row_T))
        token_ids_T = torch.where(fields.token_ids_T < 0, last_token_id_T, fields.token_ids_T)
        return self.model.hidden(token_ids_T, step.layout(fields), self.caches, last_N, step.sizes.mixed)

    def plan_replay(self, step: PackedStep, fields: Fields) -> None:
        """Plan on the host what must be, before a graph of the step's sizes is captured or replayed."""
        planned = self.model.operators.mla.attention.host_planned
        if planned and not step.sizes.mixed:
            layout = step.layout(fields)
            for spec, _ in self.model.kinds:
                planned.plan_replay(layout, self.caches[0], self.model.config.heads, spec)

    def draw(self, logits_NV: Tensor, step: PackedStep, fields: Fields) -> Tensor:
        """Draw ids_N, and leave them where the next step's decodes find them."""
        sampling = self.model.operators.sampling
        if step.greedy:
            ids_N = sampling.greedy(logits_NV)
        else:
            ids_N = sampling.sample_padded(
                logits_NV, fields.temperature_N, fields.top_k_N, fields.top_p_N, fields.min_p_N, fields.seed_N, fields.position_N
            )
        self.last_token_id_S.index_copy_(0, fields.slots_N, ids_N)
        return ids_N


CONTEXTS = (1024, 4096)
"""Decode graphs are captured for these contexts, and for the longest: a kernel splits the longest that a graph allows among its blocks,
and those of short contexts find nothing to do."""
SPLIT_ROWS = 20
"""Up to so many rows a context is split."""
MIXED_TOKENS = (16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512)
MIXED_CONTEXT = 4096
"""The longest context of a graph with prefill chunks, whose attention is made for short ones."""


def buckets(max_requests: int) -> list[int]:
    """Batch sizes to capture: dense where a step is short."""
    sizes = [1, 2, 3, 4, *range(6, 16, 2), *range(16, 32, 4), *range(32, 64, 8), *range(64, 128, 16), *range(128, 256, 32)]
    sizes += range(256, max_requests, 64)
    return [size for size in sizes if size < max_requests] + [max_requests]


def decode_sizes(max_requests: int, slots: SlotTable) -> list[Sizes]:
    """The inputs of each graph of decodes."""
    narrow = {slots.width(context) for context in CONTEXTS}
    widths = sorted({width for width in narrow if width < slots.max_pages} | {slots.max_pages})
    batches = buckets(max_requests)
    return [Sizes(rows, rows, rows, width) for rows in batches for width in (widths if rows <= SPLIT_ROWS else widths[-1:])]


def mixed_sizes(max_requests: int, step_tokens: int, slots: SlotTable) -> list[Sizes]:
    """The inputs of each graph that prefill chunks may be part of."""
    width = min(slots.width(MIXED_CONTEXT), slots.max_pages)
    counts = [(tokens, min(tokens, max_requests)) for tokens in MIXED_TOKENS if tokens <= step_tokens]
    return [Sizes(tokens, rows, rows, width, mixed=True) for tokens, rows in counts]


@dataclass(frozen=True)
class CapturedStep:
    """A graph, and what a replay leaves behind until the next."""

    graph: torch.cuda.CUDAGraph
    fields: Fields
    """Where it finds its inputs."""
    ids_N: Tensor
    chosen_experts: list[Tensor]
    """ids_TK of each layer with experts."""


class StepGraphs:
    """Captures on the current stream, which must not be the default one, and replays there."""

    def __init__(self, runner: StepRunner, slots: SlotTable) -> None:
        self._runner, self._slots = runner, slots
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[Sizes, bool], CapturedStep] = {}
        self._sizes: list[Sizes] = []

    def __len__(self) -> int:
        return len(self._graphs)

    def sizes(self, step: Sizes) -> Sizes | None:
        """The inputs of the smallest graph that holds a step; None: there is none."""
        return next((sizes for sizes in self._sizes if sizes.holds(step)), None)

    def capture(self, sizes: list[Sizes], upload: Callable[[Sizes], PackedStep]) -> None:
        """Capture a greedy and a sampling graph for each of the sizes, the largest first: the smaller ones then find room in its memory.

        `upload` puts a step of nothing but padded rows into the block.
        """
        warm = None
        with _no_garbage_collection():
            for each in sorted(sizes, key=_order, reverse=True):
                padding = upload(each)
                for greedy in (False, True):
                    # Graphs that differ in the width of the page table alone run the same kernels.
                    self._graphs[each, greedy] = self._capture(padding, greedy, warm == (each.mixed, each.tokens))
                warm = each.mixed, each.tokens
        self._sizes = sorted({each for each, _ in self._graphs}, key=_order)

    def _capture(self, padding: PackedStep, greedy: bool, warm: bool) -> CapturedStep:
        sizes = padding.sizes
        # A graph knows no values of the host: every context may be as long as the page table allows.
        decodes = 0 if sizes.mixed else sizes.rows
        contexts_R = np.full(decodes, sizes.pages * self._slots.page_size)
        step = PackedStep(sizes, decodes, np.ones(decodes, np.int64), contexts_R, greedy, captured=True)
        fields = device_fields(self._runner.block, sizes)
        self._runner.plan_replay(padding, fields)

        def run() -> Tensor:
            return self._runner.draw(self._runner.logits(step, fields), step, fields)

        if not warm:
            # What is compiled or set up at first use must not be captured.
            run()
        # What this holds must not be let go within the capture.
        self._runner.model.take_chosen_experts()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            ids_N = run()
        # The first replay uploads the graph.
        graph.replay()
        return CapturedStep(graph, fields, ids_N, self._runner.model.take_chosen_experts())

    def replay(self, step: PackedStep) -> CapturedStep:
        """Start the step, whose inputs are in the block."""
        captured = self._graphs[step.sizes, step.greedy]
        self._runner.plan_replay(step, captured.fields)
        captured.graph.replay()
        return captured


def _order(sizes: Sizes) -> tuple[bool, int, int]:
    return sizes.mixed, sizes.tokens, sizes.pages


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A tensor or graph that is freed in the midst of a capture would spoil it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
