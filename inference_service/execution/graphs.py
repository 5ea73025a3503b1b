"""A step on the GPU, and its CUDA graphs: one replay computes a step of decodes, sampling and the next step's inputs included.

Shapes: T tokens, B decode rows, N rows that sample, S slots, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
        token_ids_T = self.last_token_id_S.index_select(0, fields.slots_N[: step.decodes])
        if step.decodes < step.sizes.tokens:
            token_ids_T = torch.cat((token_ids_T, fields.token_ids_T[step.decodes :]))
        last_N = None if step.sizes.samples == step.sizes.tokens else fields.last_N
        return self.model.forward(token_ids_T, step.layout(fields), self.caches, last_N)

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


def buckets(max_requests: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, then by 8, by 16 from 32 on, by 32 from 64 on, by 64 from 256 on."""
    sizes = [1, 2, 4, *range(8, 32, 8), *range(32, 64, 16), *range(64, 256, 32), *range(256, max_requests, 64)]
    return [size for size in sizes if size < max_requests] + [max_requests]


class DecodeGraphs:
    """Captures on the current stream, which must not be the default one, and replays there."""

    def __init__(self, runner: StepRunner, slots: SlotTable) -> None:
        self._runner, self._slots = runner, slots
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._sizes: list[int] = []

    def __len__(self) -> int:
        return len(self._graphs)

    def sizes(self, rows: int) -> Sizes | None:
        """The inputs of the smallest graph for so many decode rows; None: there is none."""
        bucket = next((size for size in self._sizes if size >= rows), None)
        return None if bucket is None else Sizes(bucket, bucket, bucket, self._slots.max_pages)

    def capture(self, sizes: list[int], upload: Callable[[Sizes], PackedStep]) -> None:
        """Capture a greedy and a sampling graph for each size, the largest first: the smaller ones then find room in its memory.

        `upload` puts a step of nothing but padded rows into the block.
        """
        with _no_garbage_collection():
            for size in sorted(sizes, reverse=True):
                inputs = Sizes(size, size, size, self._slots.max_pages)
                upload(inputs)
                for greedy in (False, True):
                    self._graphs[size, greedy] = self._capture(inputs, greedy)
        self._sizes = sorted({size for size, _ in self._graphs})

    def _capture(self, sizes: Sizes, greedy: bool) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        # A graph knows no values of the host: every context may be as long as the page table allows.
        contexts = [sizes.pages * self._slots.page_size] * sizes.rows
        step = PackedStep(sizes, sizes.rows, [1] * sizes.rows, contexts, greedy)
        fields = device_fields(self._runner.block, sizes)

        def run() -> Tensor:
            return self._runner.draw(self._runner.logits(step, fields), step, fields)

        # What is compiled or set up at first use must not be captured.
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            ids_B = run()
        # The first replay uploads the graph.
        graph.replay()
        return graph, ids_B

    def replay(self, sizes: Sizes, greedy: bool) -> Tensor:
        """Start the step whose inputs are in the block. Gives ids_B, which the next replay overwrites."""
        graph, ids_B = self._graphs[sizes.rows, greedy]
        graph.replay()
        return ids_B


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A tensor or graph that is freed in the midst of a capture would spoil it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
