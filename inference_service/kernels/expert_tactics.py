"""Which of CUTLASS's kernels multiply the experts: measured here, for the operator as a whole, and found again in a microsecond.

FlashInfer's own autotuner measures each product alone, without the activation between them and with uniform routing only; and its look-up
takes more of the host's time than all the rest of a call. So its place in FlashInfer is taken.

A tactic is FlashInfer's number of a kernel: tile, schedule, cluster. Each of the two products has its own.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

Pair = tuple[int, int]
"""The tactics of both products: gate and up, then down."""
PRODUCTS = ("trtllm::fused_moe::gemm1", "trtllm::fused_moe::gemm2")
UNTUNED: Pair = (-1, -1)
"""FlashInfer's default."""
TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
"""The batches that are tuned for; one between runs as the next larger, one beyond as the last."""
PROMPT_TOKENS = 512
"""A batch from here up is mostly prompts, whose tokens resemble each other: there a pair must do well too where all choose the same
experts. A tile that is made for few tokens an expert takes several times as long then."""
SLOWER = 1.3
"""A pair that takes longer than this beside the best so far is not measured a second time."""
DELAY_S, MOST_DELAY_S = 0.002, 0.1
"""How long the device waits before what is timed, while the host launches it: at first, and where that is found too short."""
CYCLES_A_S = 3e9
"""More than the clock of any GPU has."""
MOST_ERROR = 0.02
"""Between the outputs of two tactics, relative: they round differently, and a kernel that is wrong is far beyond."""

Moe = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The experts' outputs y_TC from x_TC, ids_TK and weights_TK."""
Timer = Callable[[Callable[[], Tensor], int], float]
"""Microseconds of one of so many runs."""


class ExpertTactics:
    """Stands in for `choose_one` of FlashInfer's autotuner where that is asked for the experts' tactics."""

    def __init__(self, otherwise: Callable[..., Any], timer: Timer) -> None:
        self.otherwise, self._timer = otherwise, timer
        """FlashInfer's own."""
        self.pairs: dict[int, Pair] = {}
        """In use, by the number of tokens, which ascends."""
        self._forced: Pair | None = None
        self.valid: dict[str, list[int]] = {}
        """What FlashInfer says of each product's tactics, once it has been asked during tuning."""

    def choose_one(self, custom_op: str, runners: list[Any], tuning_config: Any, inputs: list[Any], **arguments: Any) -> tuple[Any, int]:
        """The runner to use, and its tactic."""
        if custom_op not in PRODUCTS:
            runner, tactic = self.otherwise(custom_op, runners, tuning_config, inputs, **arguments)
            return runner, tactic
        if self._forced is None:
            return runners[0], self.find(inputs[0].shape[0])[PRODUCTS.index(custom_op)]
        if custom_op not in self.valid:
            self.valid[custom_op] = list(runners[0].get_valid_tactics(inputs, None))
        return runners[0], self._forced[PRODUCTS.index(custom_op)]

    def find(self, tokens: int) -> Pair:
        """What is used for so many tokens."""
        if not self.pairs:
            return UNTUNED
        return self.pairs[self._sizes[min(bisect_left(self._sizes, tokens), len(self._sizes) - 1)]]

    def use(self, pairs: Mapping[int, Pair]) -> None:
        """From now on, by the number of tokens."""
        self._sizes = sorted(pairs)
        self.pairs = {size: pairs[size] for size in self._sizes}

    def tune(self, moe: Moe, like_C: Tensor, experts: int, top_k: int, most_tokens: int) -> dict[int, Pair]:
        """Measure all tactics for each of TOKENS up to `most_tokens`; inputs are of the dtype, size and device of `like_C`."""
        sizes = [size for size in TOKENS if size <= most_tokens] or [TOKENS[0]]
        try:
            return {size: self._tune(moe, size, like_C, experts, top_k) for size in sizes}
        finally:
            self._forced = None

    def _tune(self, moe: Moe, tokens: int, like_C: Tensor, experts: int, top_k: int) -> Pair:
        x_TC = torch.randn(tokens, len(like_C), dtype=like_C.dtype, device=like_C.device)
        weights_TK = torch.full((tokens, top_k), 1 / top_k, device=like_C.device)
        uniform_TK = torch.rand(tokens, experts, device=like_C.device).topk(top_k).indices.int()
        routings = [uniform_TK, uniform_TK[:1].repeat(tokens, 1)] if tokens >= PROMPT_TOKENS else [uniform_TK]
        self._forced = UNTUNED
        expected = [moe(x_TC, ids_TK, weights_TK) for ids_TK in routings]

        def cost(pair: Pair, limit: float) -> float:
            """Microseconds over all routings; infinite where it fails, is wrong, or is far beyond the limit."""
            self._forced, total = pair, 0.0
            for ids_TK, expected_TC in zip(routings, expected, strict=True):
                run = partial(moe, x_TC, ids_TK, weights_TK)
                try:
                    y_TC = run()
                    error = relative_error(y_TC, expected_TC)
                except Exception:  # whatever FlashInfer raises for a kernel that does not run here
                    clear_error()
                    return float("inf")
                if not error < MOST_ERROR or total + self._timer(run, 1) > SLOWER * limit:
                    return float("inf")
                total += self._timer(run, 4)
            return total

        best, least = UNTUNED, cost(UNTUNED, float("inf"))
        for product, name in enumerate(PRODUCTS):
            for tactic in self.valid[name]:
                pair = (tactic, best[1]) if product == 0 else (best[0], tactic)
                if (time := cost(pair, least)) < least:
                    best, least = pair, time
        return best


@cache
def expert_tactics() -> ExpertTactics:
    """This process's, which FlashInfer asks from now on."""
    from flashinfer.autotuner import AutoTuner

    tuner: Any = AutoTuner.get()
    tactics = ExpertTactics(tuner.choose_one, microseconds)
    tuner.choose_one = tactics.choose_one
    return tactics


def relative_error(y: Tensor, expected: Tensor) -> float:
    error, size = (y.float() - expected.float()).norm(), expected.float().norm()
    return float((error / size).item())


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """Of the device, for one run: it has nothing to wait for, since all is launched before it begins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    delay_s = DELAY_S
    while True:
        torch.cuda._sleep(int(delay_s * CYCLES_A_S))  # type: ignore[no-untyped-call]
        launching = time.perf_counter()
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        launching_s = time.perf_counter() - launching
        end.synchronize()
        if launching_s < delay_s or delay_s >= MOST_DELAY_S:
            return 1e3 * float(begin.elapsed_time(end)) / repeats
        delay_s = min(2 * launching_s, MOST_DELAY_S)


def clear_error() -> None:
    """Else a launch that failed is reported by whatever comes next."""
    with suppress(Exception):
        torch.cuda.synchronize()
    with suppress(Exception):
        torch.cuda.cudart().cudaGetLastError()  # type: ignore[no-untyped-call]
