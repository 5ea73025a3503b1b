"""Experts: the gated MLPs of a sparse layer, behind a uniform routing.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size, A = T K assignments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.kernels.case import FP8_TOLERANCE, NO_VLLM, VLLM, Backend, Bench, Call, Case, Operator, Work, absent, up_to
from baselines.kernels.fp8 import IN_BLOCKS, OWN_IN_BLOCKS, to_blocks
from inference_service.execution.tuning import describe, load_tuning
from inference_service.kernels import support
from inference_service.kernels.expert_tactics import Pair, expert_tactics
from inference_service.kernels.flashinfer_fp8 import TritonFp8Moe
from inference_service.kernels.fp8 import BlockFp8
from inference_service.kernels.support_row import FLASHINFER, GPUS, HALVES, NO_HALF, Row

UNEVEN_TOKENS = 256
"""Beyond so many tokens the own kernels are not run on experts of uneven sizes, for which they have none for many."""
GEN = "FlashInfer has it for sm_100 and sm_103"
BLOCK_ONLY = "FlashInfer's block-scaled FP8 experts of CUTLASS are for sm_90"


@dataclass(frozen=True)
class Experts:
    """The inputs of a call; copies share the weights, of which each touches others."""

    x_TC: Tensor
    ids_TK: Tensor
    weights_TK: Tensor
    gate_up_E2IC: Tensor
    """[gate, up] of each expert."""
    down_ECI: Tensor


def touched(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that so many tokens go to, at uniform routing: the expectation."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


class Moe(Operator):
    name = "moe"

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench)
        self._weights: tuple[Tensor, Tensor] | None = None
        self._packed: dict[str, Any] = {}
        """The weights by what they are laid out for, each made once; and under `tactics` those of CUTLASS."""

    def cases(self) -> list[Case]:
        if self.bench.shape.moe is None:
            return []
        decodes = [Case("decode", {"tokens": tokens}) for tokens in self.bench.grid.few_tokens]
        return decodes + [Case("prefill", {"tokens": tokens}) for tokens in self.bench.grid.prefills]

    def work(self, case: Case) -> Work:
        shape, moe, size = self.bench.shape, self.bench.shape.moe, self.bench.dtype.itemsize
        assert moe is not None
        tokens, expert = case.sizes["tokens"], 3 * shape.hidden_size * moe.intermediate_size
        return Work(
            flops=2.0 * tokens * moe.top_k * expert,
            bytes=size * (touched(moe.experts, moe.top_k, tokens) * expert + 2.0 * tokens * shape.hidden_size),
            precision=support.dtype_name(self.bench.dtype),
        )

    def make(self, case: Case, copies: int) -> list[Experts]:
        bench, shape, moe = self.bench, self.bench.shape, self.bench.shape.moe
        assert moe is not None
        if self._weights is None:
            gate_up = bench.normal(moe.experts, 2 * moe.intermediate_size, shape.hidden_size).mul_(0.05)
            self._weights = gate_up, bench.normal(moe.experts, shape.hidden_size, moe.intermediate_size).mul_(0.05)
        made = []
        for _ in range(copies):
            scores_TK, ids_TK = torch.rand(case.sizes["tokens"], moe.experts, device=bench.device).topk(moe.top_k)
            weights_TK = scores_TK / scores_TK.sum(-1, keepdim=True)
            made.append(Experts(bench.normal(case.sizes["tokens"], shape.hidden_size), ids_TK.int(), weights_TK, *self._weights))
        return made

    def reference(self, inputs: Experts) -> Tensor:
        """Expert by expert."""
        y_TC = torch.zeros(inputs.x_TC.shape, device=inputs.x_TC.device)
        for expert in sorted(set(inputs.ids_TK.flatten().tolist())):
            tokens, slots = (inputs.ids_TK == expert).nonzero(as_tuple=True)
            gate_AI, up_AI = (inputs.x_TC[tokens].float() @ inputs.gate_up_E2IC[expert].float().T).chunk(2, dim=-1)
            y_AC = (F.silu(gate_AI) * up_AI) @ inputs.down_ECI[expert].float().T
            y_TC.index_add_(0, tokens, y_AC * inputs.weights_TK[tokens, slots].unsqueeze(1))
        return y_TC

    def backends(self) -> list[Backend]:
        rows = {row.backend: row for row in support.rows(self.name)}
        elsewhere = Row(self.name, "trtllm-gen", absent, frozenset(), HALVES, GEN)
        vllm = Row(self.name, "vllm-triton", VllmMoe, GPUS - {"sm_75"}, HALVES, NO_VLLM, NO_HALF, requires=VLLM)
        return [
            Backend(rows["triton"], self._prepare, self._own_limit),
            Backend(rows["cutlass"], self._prepare_tuned, note="tactics measured for the whole operator"),
            Backend(replace(rows["cutlass"], backend="cutlass-default"), self._prepare_untuned, note="FlashInfer's default tactics"),
            Backend(rows["torch"], self._prepare),
            Backend(vllm, self._prepare, note="vLLM's default configuration"),
            Backend(elsewhere, self._prepare),
        ]

    def _own_limit(self, case: Case) -> str:
        shape, moe = self.bench.shape, self.bench.shape.moe
        assert moe is not None
        return up_to(UNEVEN_TOKENS)(case) if shape.hidden_size % 128 or moe.intermediate_size % 128 else ""

    def _prepare(self, made: Any, copies: list[Experts], bench: Bench) -> list[Call]:
        layout = f"{type(made).__name__} {made.halves}" if isinstance(made, Fp8Moe | OwnFp8Moe) else str(made.halves)
        if layout not in self._packed:
            first = copies[0]
            gate, up = first.gate_up_E2IC.chunk(2, dim=1)
            gate_up = first.gate_up_E2IC if made.halves == ("gate", "up") else torch.cat((up, gate), dim=1)
            self._packed[layout] = made.pack(gate_up, first.down_ECI)
        gate_up, down = self._packed[layout]
        return [partial(made, copy.x_TC, gate_up, down, copy.ids_TK, copy.weights_TK) for copy in copies]

    def _prepare_tuned(self, made: Any, copies: list[Experts], bench: Bench) -> list[Call]:
        calls = self._prepare(made, copies, bench)
        tactics = self._tactics(made, copies[0])
        return [_with_tactics(tactics, call) for call in calls]

    def _prepare_untuned(self, made: Any, copies: list[Experts], bench: Bench) -> list[Call]:
        return [_with_tactics({}, call) for call in self._prepare(made, copies, bench)]

    def _tactics(self, made: Any, first: Experts) -> dict[int, Pair]:
        """What `prebuild` has measured here, or what is measured now."""
        if "tactics" not in self._packed:
            bench, moe = self.bench, self.bench.shape.moe
            assert moe is not None
            tuning = load_tuning(describe(bench.target, bench.setting, bench.shape))
            gate_up, down = self._packed[str(made.halves)]
            self._packed["tactics"] = (tuning and tuning.expert_tactics) or expert_tactics().tune(
                lambda x_TC, ids_TK, weights_TK: made(x_TC, gate_up, down, ids_TK, weights_TK),
                first.x_TC[0],
                moe.experts,
                moe.top_k,
                max(case.sizes["tokens"] for case in self.cases()),
            )
        tactics: dict[int, Pair] = self._packed["tactics"]
        return tactics


class Fp8Experts(Moe):
    """Weights in FP8; the reference has them unrounded."""

    name = "moe_fp8"

    def cases(self) -> list[Case]:
        return [Case("step", {"tokens": tokens}) for tokens in self.bench.grid.fp8_tokens] if self.bench.shape.moe else []

    def work(self, case: Case) -> Work:
        shape, size, work = self.bench.shape, self.bench.dtype.itemsize, super().work(case)
        activations = 2.0 * size * case.sizes["tokens"] * shape.hidden_size
        return replace(work, bytes=activations + (work.bytes - activations) / size, precision="float8")

    def backends(self) -> list[Backend]:
        row = Row(self.name, "cutlass", Fp8Moe, frozenset({"sm_90"}), HALVES, BLOCK_ONLY, NO_HALF, requires=FLASHINFER)
        elsewhere = Row(self.name, "trtllm-gen", absent, frozenset(), HALVES, GEN)
        own = replace(next(row for row in support.rows(self.name) if row.backend == "triton"), make=OwnFp8Moe)
        return [
            Backend(own, self._prepare, self._own_limit, FP8_TOLERANCE, note=OWN_IN_BLOCKS),
            Backend(row, self._prepare_untuned, tolerance=FP8_TOLERANCE, note=IN_BLOCKS),
            Backend(elsewhere, self._prepare),
        ]


def _with_tactics(tactics: dict[int, Pair], call: Call) -> Call:
    def run() -> Any:
        expert_tactics().use(tactics)
        return call()

    return run


class OwnFp8Moe(TritonFp8Moe):
    """The own kernels for weights in FP8 blocks."""

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[BlockFp8, BlockFp8]:
        return BlockFp8(*to_blocks(gate_up_E2IC)), BlockFp8(*to_blocks(down_ECI))


class Fp8Moe:
    """CUTLASS's experts with block-scaled FP8 weights, in FlashInfer."""

    halves = ("up", "gate")

    def __init__(self) -> None:
        from baselines.kernels import flashinfer_calls
        from inference_service.kernels import flashinfer_moe

        flashinfer_moe.CutlassMoe()
        self._call: Callable[..., Tensor] = flashinfer_calls.fp8_moe

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return to_blocks(gate_up_E2IC), to_blocks(down_ECI)

    def __call__(self, x_TC: Tensor, gate_up: Any, down: Any, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._call(x_TC, gate_up[0], down[0], [gate_up[1], down[1]], ids_TK, weights_TK)


class VllmMoe:
    """vLLM's fused experts, in Triton."""

    halves = ("gate", "up")

    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe import fused_experts

        self._call: Callable[..., Tensor] = fused_experts

    def pack(self, gate_up_E2IC: Tensor, down_ECI: Tensor) -> tuple[Tensor, Tensor]:
        return gate_up_E2IC, down_ECI

    def __call__(self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._call(hidden_states=x_TC, w1=gate_up, w2=down, topk_weights=weights_TK, topk_ids=ids_TK)
