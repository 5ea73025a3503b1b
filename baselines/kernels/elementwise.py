"""Norms, rotary embedding, and the way from QKV into the cache.

Shapes: T tokens, C hidden size, H heads, N query, key and value heads together, D head dim, P positions; the cache is kv_P2HSD.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.kernels.attention import flashinfer_row, make_layout, with_long_indices
from baselines.kernels.attention_adapters import Pages
from baselines.kernels.case import NO_VLLM, VLLM, Backend, Bench, Call, Case, Operator, Work
from inference_service.kernels import support
from inference_service.kernels.attention import StepLayout
from inference_service.kernels.kv_append import HeadNorms, TorchKvAppend
from inference_service.kernels.rope import rotate, rotations
from inference_service.kernels.support_row import GPUS, HALVES, NO_HALF, Row
from inference_service.models.rotary import rotary_table

EPS = 1e-6


class InPlace(Operator):
    """An operator that writes to its inputs."""

    def cases(self) -> list[Case]:
        """Steps of decodes, and prompts."""
        grid, longest = self.bench.grid, self.bench.shape.max_context
        decodes = [Case("decode", {"tokens": tokens}) for tokens in grid.batches]
        return decodes + [Case("prefill", {"tokens": tokens}) for tokens in grid.prefills if tokens <= longest]

    def fresh(self, copies: list[Any]) -> list[Any]:
        return deepcopy(copies)


@dataclass(frozen=True)
class Normed:
    x_TC: Tensor
    residual_TC: Tensor
    weight_C: Tensor


class Norm(InPlace):
    """The norm of a residual to which x is added first."""

    name = "norm"

    def work(self, case: Case) -> Work:
        """x and the residual are read and written."""
        size = self.bench.dtype.itemsize
        return Work(0.0, float(size * self.bench.shape.hidden_size * (4 * case.sizes["tokens"] + 1)), support.dtype_name(self.bench.dtype))

    def make(self, case: Case, copies: int) -> list[Normed]:
        bench, size = self.bench, self.bench.shape.hidden_size
        tokens = case.sizes["tokens"]
        return [Normed(bench.normal(tokens, size), bench.normal(tokens, size), bench.normal(size)) for _ in range(copies)]

    def reference(self, inputs: Normed) -> Tensor:
        total_TC = inputs.x_TC.float() + inputs.residual_TC.float()
        return torch.cat((F.rms_norm(total_TC, inputs.weight_C.shape, inputs.weight_C.float(), EPS), total_TC))

    def outcome(self, inputs: Normed, output: Tensor) -> Tensor:
        return torch.cat((output, inputs.residual_TC))

    def backends(self) -> list[Backend]:
        vllm = Row(self.name, "vllm", VllmNorm, GPUS, HALVES, NO_VLLM, NO_HALF, requires=VLLM)
        return [Backend(row, _add_norm) for row in (*support.rows(self.name), vllm)]


def _add_norm(made: Any, copies: list[Normed], bench: Bench) -> list[Call]:
    return [partial(made.add_rms_norm, copy.x_TC, copy.residual_TC, copy.weight_C, EPS) for copy in copies]


class VllmNorm:
    """vLLM's fused norm."""

    def __init__(self) -> None:
        from vllm import _custom_ops

        self._call: Callable[..., None] = _custom_ops.fused_add_rms_norm

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        self._call(x_TC, residual_TC, weight_C, eps)
        return x_TC


@dataclass(frozen=True)
class Turned:
    q_THD: Tensor
    k_THD: Tensor
    positions_T: Tensor
    table_PD: Tensor


class Rope(InPlace):
    """Queries and keys are turned in place. What serves here does it within `kv_append`."""

    name = "rope"

    def work(self, case: Case) -> Work:
        shape = self.bench.shape
        values = case.sizes["tokens"] * (shape.heads + shape.kv_heads) * shape.head_dim
        return Work(0.0, float(2 * self.bench.dtype.itemsize * values), support.dtype_name(self.bench.dtype))

    def make(self, case: Case, copies: int) -> list[Turned]:
        bench, shape, tokens = self.bench, self.bench.shape, case.sizes["tokens"]
        table_PD = rotary_table(shape.rope, shape.head_dim, tokens, bench.device)
        positions_T = bench.ints(range(tokens))
        return [
            Turned(
                bench.normal(tokens, shape.heads, shape.head_dim),
                bench.normal(tokens, shape.kv_heads, shape.head_dim),
                positions_T,
                table_PD,
            )
            for _ in range(copies)
        ]

    def reference(self, inputs: Turned) -> Tensor:
        both_THD = torch.cat((inputs.q_THD, inputs.k_THD), dim=1).float()
        rotate(both_THD, rotations(inputs.table_PD, inputs.positions_T, torch.float32))
        return both_THD

    def outcome(self, inputs: Turned, output: None) -> Tensor:
        return torch.cat((inputs.q_THD, inputs.k_THD), dim=1)

    def backends(self) -> list[Backend]:
        vllm = Row(self.name, "vllm", VllmRope, GPUS, HALVES, NO_VLLM, NO_HALF, requires=VLLM)
        return [
            Backend(flashinfer_row(self.name, "flashinfer", FlashInferRope), _turn),
            Backend(Row(self.name, "torch", TorchRope), _turn),
            Backend(vllm, _turn),
        ]


def _turn(made: Any, copies: list[Turned], bench: Bench) -> list[Call]:
    return [partial(made, copy.positions_T, copy.q_THD, copy.k_THD, copy.table_PD) for copy in copies]


class TorchRope:
    """Plain tensor operations."""

    def __call__(self, positions_T: Tensor, q_THD: Tensor, k_THD: Tensor, table_PD: Tensor) -> None:
        turns = rotations(table_PD, positions_T, q_THD.dtype)
        rotate(q_THD, turns)
        rotate(k_THD, turns)


class FlashInferRope:
    """One launch for both."""

    def __init__(self) -> None:
        from baselines.kernels import flashinfer_calls

        self._call: Callable[..., None] = flashinfer_calls.rope

    def __call__(self, *arguments: Tensor) -> None:
        self._call(*arguments)


class VllmRope:
    """The same by vLLM, whose table has the dtype of what is turned."""

    def __init__(self) -> None:
        from vllm import _custom_ops

        self._call: Callable[..., None] = _custom_ops.rotary_embedding
        self._table: Tensor | None = None

    def __call__(self, positions_T: Tensor, q_THD: Tensor, k_THD: Tensor, table_PD: Tensor) -> None:
        if self._table is None or len(self._table) != len(table_PD):
            self._table, self._positions = table_PD.to(q_THD.dtype), positions_T.long()
        if len(self._positions) != len(positions_T):
            self._positions = positions_T.long()
        self._call(self._positions, q_THD.flatten(1), k_THD.flatten(1), q_THD.shape[2], self._table, True)


@dataclass(frozen=True)
class Appended:
    layout: StepLayout
    qkv_TND: Tensor
    kv_P2HSD: Tensor
    norms: HeadNorms | None
    table_PD: Tensor


class KvAppend(InPlace):
    """Norms of query and key heads where the model has them, rotation, and the write into the cache."""

    name = "kv_append"

    def work(self, case: Case) -> Work:
        """QKV is read, and as much written."""
        shape = self.bench.shape
        values = case.sizes["tokens"] * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return Work(0.0, float(2 * self.bench.dtype.itemsize * values), support.dtype_name(self.bench.dtype))

    def make(self, case: Case, copies: int) -> list[Appended]:
        bench, shape, tokens = self.bench, self.bench.shape, case.sizes["tokens"]
        # How long the contexts are before is all the same.
        page = [bench.setting.page_size] * tokens
        layout, pages = make_layout(bench, page, []) if case.kind == "decode" else make_layout(bench, [], [(tokens, tokens)])
        table_PD = rotary_table(shape.rope, shape.head_dim, max(layout.contexts), bench.device)
        norms = HeadNorms(bench.normal(shape.head_dim), bench.normal(shape.head_dim), EPS) if shape.qk_norm else None
        made = []
        for _ in range(copies):
            kv_P2HSD = torch.zeros(
                pages, 2, shape.kv_heads, bench.setting.page_size, shape.head_dim, dtype=bench.dtype, device=bench.device
            )
            made.append(Appended(layout, bench.normal(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim), kv_P2HSD, norms, table_PD))
        return made

    def reference(self, inputs: Appended) -> Tensor:
        append, norms = TorchKvAppend(), inputs.norms
        norms32 = HeadNorms(norms.q_D.float(), norms.k_D.float(), norms.eps) if norms else None
        kv_P2HSD, layout = inputs.kv_P2HSD.float().clone(), with_long_indices(inputs.layout)
        q_THD = append(inputs.qkv_TND.float().clone(), norms32, kv_P2HSD, append.plan(layout, kv_P2HSD, inputs.table_PD))
        return torch.cat((q_THD.flatten(), kv_P2HSD.flatten()))

    def outcome(self, inputs: Appended, output: Tensor) -> Tensor:
        return torch.cat((output.flatten(), inputs.kv_P2HSD.flatten()))

    def backends(self) -> list[Backend]:
        rows = support.rows(self.name)
        separate = flashinfer_row(self.name, "flashinfer", SeparateAppend)
        return [*(Backend(row, _append) for row in rows), Backend(separate, _append, note="norms, rotation and append apart")]


def _append(made: Any, copies: list[Appended], bench: Bench) -> list[Call]:
    first = copies[0]
    layout = with_long_indices(first.layout) if isinstance(made, TorchKvAppend) else first.layout
    plan = made.plan(layout, first.kv_P2HSD, first.table_PD)
    return [partial(made, copy.qkv_TND, copy.norms, copy.kv_P2HSD, plan) for copy in copies]


class SeparateAppend:
    """FlashInfer's kernels one after the other, on heads copied out of QKV."""

    def __init__(self) -> None:
        from baselines.kernels import flashinfer_calls
        from inference_service.kernels import flashinfer_ops

        self._calls, self._ops = flashinfer_calls, flashinfer_ops

    def plan(self, layout: StepLayout, kv_P2HSD: Tensor, table_PD: Tensor) -> Any:
        return layout, Pages(layout, slice(None), kv_P2HSD.shape[3]), table_PD

    def __call__(self, qkv_TND: Tensor, norms: HeadNorms | None, kv_P2HSD: Tensor, plan: Any) -> Tensor:
        layout, pages, table_PD = plan
        kv_heads = kv_P2HSD.shape[2]
        q_THD, k_THD = qkv_TND[:, : -2 * kv_heads].contiguous(), qkv_TND[:, -2 * kv_heads : -kv_heads].contiguous()
        if norms:
            q_THD = self._ops.rms_norm(q_THD.flatten(0, 1), norms.q_D, norms.eps, False).view_as(q_THD)
            k_THD = self._ops.rms_norm(k_THD.flatten(0, 1), norms.k_D, norms.eps, False).view_as(k_THD)
        self._calls.rope(layout.positions_T, q_THD, k_THD, table_PD)
        self._calls.append(k_THD, qkv_TND[:, -kv_heads:].contiguous(), layout.row_T, layout.positions_T, kv_P2HSD, pages)
        return q_THD
