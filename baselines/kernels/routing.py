"""Routing: softmax over the experts, then each token's best.

Shapes: T tokens, E experts, K experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baselines.kernels.case import NO_VLLM, VLLM, Backend, Bench, Call, Case, Operator, Work, absent
from inference_service.kernels import support
from inference_service.kernels.support_row import GPUS, Row


class Routing(Operator):
    name = "routing"

    def cases(self) -> list[Case]:
        if self.bench.shape.moe is None:
            return []
        decodes = [Case("decode", {"tokens": tokens}) for tokens in self.bench.grid.batches]
        return decodes + [Case("prefill", {"tokens": tokens}) for tokens in self.bench.grid.prefills]

    def work(self, case: Case) -> Work:
        moe, tokens = self.bench.shape.moe, case.sizes["tokens"]
        assert moe is not None
        return Work(0.0, float(tokens * (moe.experts * self.bench.dtype.itemsize + 8 * moe.top_k)), support.dtype_name(self.bench.dtype))

    def make(self, case: Case, copies: int) -> list[Tensor]:
        moe = self.bench.shape.moe
        assert moe is not None
        return [self.bench.normal(case.sizes["tokens"], moe.experts) for _ in range(copies)]

    def reference(self, inputs: Tensor) -> Tensor:
        """The weights, best first: of equal experts any may be taken."""
        assert self.bench.shape.moe is not None
        weights_TK = inputs.float().softmax(-1).topk(self.bench.shape.moe.top_k).values
        return weights_TK / weights_TK.sum(-1, keepdim=True) if self.bench.shape.moe.renormalize else weights_TK

    def outcome(self, inputs: Tensor, output: tuple[Tensor, Tensor]) -> Tensor:
        """The weights, where each is that of its expert."""
        assert self.bench.shape.moe is not None
        ids_TK, weights_TK = output
        chosen_TK = inputs.float().softmax(-1).gather(1, ids_TK.long())
        if self.bench.shape.moe.renormalize:
            chosen_TK /= chosen_TK.sum(-1, keepdim=True)
        right = torch.isclose(chosen_TK, weights_TK.float(), rtol=1e-3).all()
        return weights_TK.float().sort(descending=True).values if right else torch.zeros_like(weights_TK)

    def backends(self) -> list[Backend]:
        deepseek = Row(
            self.name, "flashinfer", absent, frozenset(), elsewhere="fused_topk_deepseek is for DeepSeek-V3's groups and sigmoid"
        )
        vllm = Row(self.name, "vllm", VllmRouting, GPUS, elsewhere=NO_VLLM, requires=VLLM)
        return [*(Backend(row, self._prepare) for row in (*support.rows(self.name), deepseek, vllm))]

    def _prepare(self, made: Any, copies: list[Tensor], bench: Bench) -> list[Call]:
        moe = bench.shape.moe
        assert moe is not None
        return [partial(made, logits_TE, moe.top_k, moe.renormalize) for logits_TE in copies]


class VllmRouting:
    """vLLM's fused softmax and top-k."""

    def __init__(self) -> None:
        from vllm import _custom_ops

        self._call: Callable[..., None] = _custom_ops.topk_softmax

    def __call__(self, logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        weights_TK = torch.empty(len(logits_TE), top_k, device=logits_TE.device)
        ids_TK, unused_TK = (torch.empty(len(logits_TE), top_k, dtype=torch.int32, device=logits_TE.device) for _ in range(2))
        self._call(weights_TK, ids_TK, unused_TK, logits_TE, renormalize)
        return ids_TK, weights_TK
