"""Attention over the paged cache: decodes, prefills, and both in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from baselines.kernels import attention_adapters as adapters
from baselines.kernels.case import CUDNN, VLLM, Backend, Bench, Call, Case, Operator, Work
from inference_service.kernels import support
from inference_service.kernels.attention import SplitAttention, StepLayout
from inference_service.kernels.attention_torch import TorchDecode, TorchPrefill
from inference_service.kernels.support_row import FLASHINFER, GPUS, HALVES, NO_GPU, NO_HALF, Row

PAIRS = (("xqa", "fa3"), ("xqa", "fmha_v2"), ("triton", "fa3"), ("fa2", "fa2"), ("torch", "torch"))
"""Decode and prefill backends that share a mixed step, one after the other."""
FUSED = ("pod", "batch_pod", "batch_attention")
"""Served backends whose calls plan on the host; here adapters plan once."""
POD_NOTE = "the chunk's keys and values lie without pages; what clears its counters runs on the default stream, which no graph holds"
OWN_PAGES = 4
"""How many pages a row does not share, where it shares the others."""
LARGEST_GATHER = 4 << 30
"""The bytes from which the reference of whole steps, which gathers each token's context, is not run."""
HOPPER = frozenset({"sm_90"})


@dataclass(frozen=True)
class Step:
    """The inputs of a call; copies share the layout, and have a cache and queries each."""

    layout: StepLayout
    q_THD: Tensor
    kv_P2HSD: Tensor
    o_THD: Tensor
    shared_pages: int
    """How many pages of all rows are the same."""


def make_layout(bench: Bench, decodes: Sequence[int], chunks: Sequence[tuple[int, int]], shared_pages: int = 0) -> tuple[StepLayout, int]:
    """A step of decodes with these contexts and chunks of (length, context), on shuffled pages; and how many pages there are."""
    size = bench.setting.page_size
    lengths, contexts = [1] * len(decodes) + [length for length, _ in chunks], [*decodes, *(context for _, context in chunks)]
    own, width = [-(-context // size) - shared_pages for context in contexts], -(-max(contexts) // size)
    total = shared_pages + sum(own)
    shuffled = torch.randperm(total).tolist()
    shared, rest = shuffled[:shared_pages], iter(shuffled[shared_pages:])
    rows = [[*shared, *(next(rest) for _ in range(count))] for count in own]
    positions = [position for length, context in zip(lengths, contexts, strict=True) for position in range(context - length, context)]
    layout = StepLayout(
        decodes=len(decodes),
        lengths=lengths,
        contexts=contexts,
        positions_T=bench.ints(positions),
        row_T=bench.ints([row for row, length in enumerate(lengths) for _ in range(length)]),
        pages_RM=bench.ints([page for row in rows for page in row + row[:1] * (width - len(row))]).view(len(rows), width),
        contexts_R=bench.ints(contexts),
    )
    return layout, total


def attention_work(bench: Bench, decodes: Sequence[int], chunks: Sequence[tuple[int, int]], shared_tokens: int = 0) -> Work:
    """Two products over all that each token sees; each key and value read once, queries read and outputs written."""
    shape, size = bench.shape, bench.dtype.itemsize
    seen = sum(decodes) + sum(length * context - length * (length - 1) // 2 for length, context in chunks)
    tokens, rows = len(decodes) + sum(length for length, _ in chunks), len(decodes) + len(chunks)
    cached = sum(decodes) + sum(context for _, context in chunks) - shared_tokens * (rows - 1)
    return Work(
        flops=4.0 * shape.heads * shape.head_dim * seen,
        bytes=2.0 * shape.head_dim * size * (cached * shape.kv_heads + tokens * shape.heads),
        precision=support.dtype_name(bench.dtype),
    )


def planned(made: Any, copies: list[Step], bench: Bench) -> list[Call]:
    """Calls that write into o_THD, on one plan."""
    plan = made.plan(copies[0].layout, copies[0].kv_P2HSD, bench.shape.heads)
    return [partial(_into, made, copy, plan) for copy in copies]


def _into(made: Any, step: Step, plan: Any) -> Tensor:
    made(step.q_THD, step.kv_P2HSD, plan, step.o_THD)
    return step.o_THD


def whole(made: Any, copies: list[Step], bench: Bench) -> list[Call]:
    """Calls that return the whole step's output, on one plan."""
    plan = made.plan(copies[0].layout, copies[0].kv_P2HSD, bench.shape.heads)
    return [partial(made, copy.q_THD, copy.kv_P2HSD, plan) for copy in copies]


def cascaded(made: Any, copies: list[Step], bench: Bench) -> list[Call]:
    plan = made.plan(copies[0].layout, copies[0].kv_P2HSD, bench.shape.heads, copies[0].shared_pages)
    return [partial(made, copy.q_THD, copy.kv_P2HSD, plan) for copy in copies]


def with_long_indices(layout: StepLayout) -> StepLayout:
    """As the plain tensor operations want them."""
    longs = {name: getattr(layout, name).long() for name in ("positions_T", "row_T", "pages_RM", "contexts_R")}
    return replace(layout, **longs)


def in_torch(prepare: Any, made: Any, copies: list[Step], bench: Bench) -> list[Call]:
    calls: list[Call] = prepare(made, [replace(copy, layout=with_long_indices(copy.layout)) for copy in copies], bench)
    return calls


def served(operator: str, prepare: Any) -> list[Backend]:
    """The support table's backends."""
    rows = support.rows(operator)
    return [Backend(row, partial(in_torch, prepare) if "torch" in row.backend else prepare) for row in rows]


def flashinfer_row(operator: str, name: str, make: Any) -> Row:
    return Row(operator, name, make, GPUS, HALVES, NO_GPU, NO_HALF, requires=FLASHINFER)


def holistic(operator: str, prepare: Any) -> Backend:
    return Backend(flashinfer_row(operator, "batch-attention", adapters.HolisticAttention), prepare)


def vllm_flash(operator: str) -> Backend:
    row = Row(operator, "vllm-fa3", adapters.VllmFlash, HOPPER, HALVES, "FA3 is written for sm_90", NO_HALF, requires=VLLM)
    return Backend(row, planned)


class Attention(Operator):
    """What the three have in common."""

    def rows_of(self, case: Case) -> tuple[list[int], list[tuple[int, int]]]:
        """The contexts of the decodes, and the chunks."""
        raise NotImplementedError

    def shared_pages(self, case: Case) -> int:
        return 0

    def work(self, case: Case) -> Work:
        return attention_work(self.bench, *self.rows_of(case), self.shared_pages(case) * self.bench.setting.page_size)

    def make(self, case: Case, copies: int) -> list[Step]:
        bench, shape = self.bench, self.bench.shape
        shared = self.shared_pages(case)
        layout, pages = make_layout(bench, *self.rows_of(case), shared)
        made = []
        for _ in range(copies):
            q_THD = bench.normal(len(layout.positions_T), shape.heads, shape.head_dim)
            kv_P2HSD = bench.normal(pages, 2, shape.kv_heads, bench.setting.page_size, shape.head_dim)
            made.append(Step(layout, q_THD, kv_P2HSD, torch.full_like(q_THD, float("nan")), shared))
        return made

    def fresh(self, copies: list[Step]) -> list[Step]:
        for copy in copies:
            copy.o_THD.fill_(float("nan"))
        return copies

    def reference(self, inputs: Step) -> Tensor:
        attention, kv_P2HSD = SplitAttention(TorchDecode(), TorchPrefill()), inputs.kv_P2HSD.float()
        plan = attention.plan(with_long_indices(inputs.layout), kv_P2HSD, self.bench.shape.heads)
        return attention(inputs.q_THD.float(), kv_P2HSD, plan)


class AttentionDecode(Attention):
    name = "attention_decode"

    def cases(self) -> list[Case]:
        grid, longest = self.bench.grid, self.bench.shape.max_context
        sizes = [*product(grid.batches, grid.contexts), *product([b for b in grid.batches if b <= 8], grid.long_contexts)]
        plain = [Case("decode", {"batch": batch, "context": context}) for batch, context in sizes if context <= longest]
        context = max(grid.contexts)
        return plain + [Case("shared prefix", {"batch": batch, "context": context}) for batch in grid.shared_batches if context <= longest]

    def rows_of(self, case: Case) -> tuple[list[int], list[tuple[int, int]]]:
        return [case.sizes["context"]] * case.sizes["batch"], []

    def shared_pages(self, case: Case) -> int:
        if case.kind != "shared prefix":
            return 0
        pages = case.sizes["context"] // self.bench.setting.page_size
        # FlashInfer's cascade reads beyond its tables where nothing is shared.
        return pages - min(OWN_PAGES, pages // 2)

    def backends(self) -> list[Backend]:
        xqa = next(row for row in support.rows(self.name) if row.backend == "xqa")
        return [
            *served(self.name, planned),
            Backend(replace(xqa, backend="xqa-far", make=adapters.XqaFar), planned, note=f"its grid is for {adapters.FAR} tokens"),
            Backend(flashinfer_row(self.name, "fa2-cuda-cores", adapters.CudaCoreDecode), planned),
            Backend(
                replace(flashinfer_row(self.name, "fa3", adapters.Fa3Decode), architectures=HOPPER, elsewhere="FA3 is written for sm_90"),
                planned,
            ),
            Backend(
                flashinfer_row(self.name, "cascade", adapters.Cascade),
                cascaded,
                lambda case: "" if case.kind == "shared prefix" else "is for rows that share a prefix",
            ),
            Backend(replace(flashinfer_row(self.name, "cudnn", adapters.CudnnDecode), requires=CUDNN), planned),
            vllm_flash(self.name),
            holistic(self.name, planned),
        ]


class AttentionPrefill(Attention):
    name = "attention_prefill"

    def cases(self) -> list[Case]:
        sizes = product(self.bench.grid.prefill_batches, self.bench.grid.prefills)
        return [Case("prefill", {"batch": batch, "tokens": tokens}) for batch, tokens in sizes if tokens <= self.bench.shape.max_context]

    def rows_of(self, case: Case) -> tuple[list[int], list[tuple[int, int]]]:
        return [], [(case.sizes["tokens"], case.sizes["tokens"])] * case.sizes["batch"]

    def backends(self) -> list[Backend]:
        sdpa = Row(self.name, "torch-cudnn", adapters.TorchCudnnPrefill, GPUS, HALVES, "cuDNN runs on GPUs", NO_HALF)
        return [
            *served(self.name, planned),
            Backend(sdpa, whole, note="keys and values lie without pages"),
            Backend(replace(flashinfer_row(self.name, "cudnn", adapters.CudnnPrefill), requires=CUDNN), planned),
            vllm_flash(self.name),
            holistic(self.name, planned),
        ]


class AttentionMixed(Attention):
    name = "attention_mixed"

    def cases(self) -> list[Case]:
        grid, longest = self.bench.grid, self.bench.shape.max_context
        sizes = product(grid.chunks, grid.mixed_decodes, grid.mixed_contexts)
        return [
            Case("mixed", {"chunk": chunk, "decodes": decodes, "context": context})
            for chunk, decodes, context in sizes
            if max(chunk, context) <= longest
        ]

    def rows_of(self, case: Case) -> tuple[list[int], list[tuple[int, int]]]:
        chunk, context = case.sizes["chunk"], case.sizes["context"]
        return [context] * case.sizes["decodes"], [(chunk, max(chunk, context))]

    def backends(self) -> list[Backend]:
        row = flashinfer_row(self.name, "pod", adapters.Pod)
        kept = [each for each in served(self.name, whole) if each.name not in FUSED]
        return [
            *(replace(each, limit=self._gathers) if each.name == "torch" else each for each in kept),
            *map(self._pair, PAIRS),
            Backend(replace(row, backend="batch-pod", make=adapters.BatchPod), whole),
            vllm_flash(self.name),
            holistic(self.name, planned),
            Backend(row, whole, note=POD_NOTE, capturable=False),
        ]

    def _pair(self, names: tuple[str, str]) -> Backend:
        decode, prefill = (
            next(row for row in support.rows(operator) if row.backend == name)
            for operator, name in zip(("attention_decode", "attention_prefill"), names, strict=True)
        )

        def limit(setting: support.Setting) -> str:
            refusal = decode.refusal(setting) or prefill.refusal(setting)
            return f"needs both: {refusal}" if refusal else ""

        row = Row(self.name, "+".join(names), lambda: SplitAttention(decode.make(), prefill.make()), limit=limit)
        return Backend(row, partial(in_torch, whole) if "torch" in names else whole)

    def _gathers(self, case: Case) -> str:
        decodes, chunks = self.rows_of(case)
        shape, tokens = self.bench.shape, len(decodes) + sum(length for length, _ in chunks)
        longest = max(*decodes, *(context for _, context in chunks))
        gathered = 8 * tokens * longest * shape.kv_heads * shape.head_dim
        return f"would gather {gathered / 2**30:.0f} GiB" if gathered > LARGEST_GATHER else ""
