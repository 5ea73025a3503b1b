"""Drawing tokens: greedy, plain, and through filters; beside ours one that sorts, and FlashInfer's own.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baselines.kernels.case import NO_VLLM, VLLM, Backend, Bench, Call, Case, Operator, Work
from inference_service.kernels import support
from inference_service.kernels.support_row import ANY, FLASHINFER, GPUS, NO_GPU, Row

TEMPERATURE = 0.8
FILTERS = {"greedy": (0, 1.0), "plain": (0, 1.0), "top-p 0.95": (0, 0.95), "top-k 50, top-p 0.95": (50, 0.95)}
"""top_k (0: all) and top_p of each kind of case."""
SLACK = 0.1
"""How far below a filter's edge a logit may lie that is drawn nevertheless: sums round, and a step of bfloat16 is up to 0.06."""


@dataclass(frozen=True)
class Logits:
    """The inputs of a call; copies share all but the logits."""

    logits_RV: Tensor
    kind: str
    columns: tuple[Tensor, ...]
    """Of `sample_padded`, one value a row in each: temperature, top_k, top_p, min_p, seed, position."""


class Sampling(Operator):
    name = "sampling"
    unit = "share of draws that no filter would leave"

    def cases(self) -> list[Case]:
        return [Case(kind, {"rows": rows}) for kind in FILTERS for rows in self.bench.grid.batches]

    def work(self, case: Case) -> Work:
        """The logits are read once."""
        size = self.bench.dtype.itemsize
        return Work(0.0, float(case.sizes["rows"] * self.bench.shape.vocab_size * size), support.dtype_name(self.bench.dtype))

    def make(self, case: Case, copies: int) -> list[Logits]:
        rows, device = case.sizes["rows"], self.bench.device
        top_k, top_p = FILTERS[case.kind]
        columns = (
            torch.full((rows,), TEMPERATURE, device=device),
            torch.full((rows,), top_k, dtype=torch.int32, device=device),
            torch.full((rows,), top_p, device=device),
            torch.zeros(rows, device=device),
            torch.arange(rows, device=device),
            torch.full((rows,), 7, dtype=torch.int32, device=device),
        )
        return [Logits(self.bench.normal(rows, self.bench.shape.vocab_size).mul_(3), case.kind, columns) for _ in range(copies)]

    def reference(self, inputs: Logits) -> Tensor:
        """The least logit of each row that may be drawn."""
        logits_RV, (top_k, top_p) = inputs.logits_RV.float(), FILTERS[inputs.kind]
        if inputs.kind == "greedy":
            return logits_RV.amax(-1)
        ordered_RV = logits_RV.sort(descending=True).values[:, : top_k or logits_RV.shape[-1]]
        p_RV = (ordered_RV / TEMPERATURE).softmax(-1)
        kept_R = (p_RV.cumsum(-1) - p_RV < top_p).sum(-1)
        return ordered_RV.gather(1, kept_R.unsqueeze(1) - 1).squeeze(1)

    def error(self, inputs: Logits, output: Tensor, expected: Tensor) -> float:
        drawn_R = inputs.logits_RV.float().gather(1, output.long().view(-1, 1)).squeeze(1)
        slack = 0.0 if inputs.kind == "greedy" else SLACK
        return float((drawn_R < expected - slack).float().mean())

    def backends(self) -> list[Backend]:
        rows = support.rows(self.name)
        own = Row(self.name, "flashinfer-own", FlashInferDraws, GPUS, elsewhere=NO_GPU, requires=FLASHINFER)
        vllm = Row(self.name, "vllm", VllmDraws, GPUS, elsewhere=NO_VLLM, requires=VLLM)
        return [
            *(Backend(row, _columns, tolerance=0.0, capturable=row.backend != "torch") for row in rows),
            Backend(Row(self.name, "sort", SortingDraws, ANY), _by_filter, tolerance=0.0, note="no seed a row"),
            Backend(own, _by_filter, _random, tolerance=0.0, note="one seed for all rows"),
            Backend(vllm, _by_filter, _random, tolerance=0.0, note="no seed a row"),
        ]


def _columns(made: Any, copies: list[Logits], bench: Bench) -> list[Call]:
    if copies[0].kind == "greedy":
        return [partial(made.greedy, copy.logits_RV) for copy in copies]
    return [partial(made.sample_padded, copy.logits_RV, *copy.columns) for copy in copies]


def _by_filter(made: Any, copies: list[Logits], bench: Bench) -> list[Call]:
    if copies[0].kind == "greedy":
        return [partial(torch.argmax, copy.logits_RV, dim=-1) for copy in copies]
    return [partial(made, copy.logits_RV, *FILTERS[copy.kind]) for copy in copies]


def _random(case: Case) -> str:
    return "has no greedy draw of its own" if case.kind == "greedy" else ""


class SortingDraws:
    """The plain way: sort, cut, and race exponential variables."""

    def __call__(self, logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
        scaled_RV = logits_RV.float() / TEMPERATURE
        if not top_k and top_p >= 1:
            return self._race(scaled_RV.softmax(-1))
        ordered_RV, ids_RV = scaled_RV.sort(dim=-1, descending=True)
        if top_k:
            ordered_RV[:, top_k:] = float("-inf")
        p_RV = ordered_RV.softmax(-1)
        p_RV = p_RV.masked_fill(p_RV.cumsum(-1) - p_RV >= top_p, 0.0)
        return ids_RV.gather(1, self._race(p_RV).unsqueeze(1)).squeeze(1)

    def _race(self, p_RV: Tensor) -> Tensor:
        return (p_RV / torch.empty_like(p_RV).exponential_()).argmax(-1)


class FlashInferDraws:
    """Softmax, then FlashInfer's rejection sampling."""

    def __init__(self) -> None:
        from baselines.kernels import flashinfer_calls

        self._call: Callable[..., Tensor] = flashinfer_calls.sample

    def __call__(self, logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
        return self._call((logits_RV.float() / TEMPERATURE).softmax(-1), top_k, top_p)


class VllmDraws:
    """vLLM's filters and race."""

    def __init__(self) -> None:
        from vllm.v1.sample.ops import topk_topp_sampler

        self._ops: Any = topk_topp_sampler
        self._filters: dict[tuple[int, int, float], tuple[Tensor | None, Tensor | None]] = {}

    def __call__(self, logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
        key = len(logits_RV), top_k, top_p
        if key not in self._filters:
            k_R = torch.full((len(logits_RV),), top_k, dtype=torch.int32, device=logits_RV.device) if top_k else None
            self._filters[key] = k_R, torch.full((len(logits_RV),), top_p, device=logits_RV.device) if top_p < 1 else None
        left_RV = self._ops.apply_top_k_top_p(logits_RV.float() / TEMPERATURE, *self._filters[key])
        ids_R: Tensor = self._ops.random_sample(left_RV.softmax(dim=-1, dtype=torch.float32), {})
        return ids_R
