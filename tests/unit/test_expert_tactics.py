"""The experts' tactics: the search, and the look-up in the place of FlashInfer's. Kernels are simulated; tests/gpu runs real ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.kernels.expert_tactics import PRODUCTS, PROMPT_TOKENS, UNTUNED, ExpertTactics


class Runner:
    """Offers tactics 0 to 3 for the first product and 4 to 7 for the second."""

    def __init__(self, product: int) -> None:
        self.product = product

    def get_valid_tactics(self, inputs: list[Tensor], profile: None) -> list[int]:
        return list(range(4 * self.product, 4 * self.product + 4))


class Kernels:
    """Experts whose tactics take 100 us, or as `times` has it: by tokens of the most loaded expert and tactic."""

    def __init__(self, time: Callable[[int, int], float]) -> None:
        self.time = time
        self.clock = 0.0
        self.tactics = ExpertTactics(lambda *asked: ("other", 9), self.measure)

    def measure(self, run: Callable[[], Tensor], repeats: int) -> float:
        before = self.clock
        for _ in range(repeats):
            run()
        return (self.clock - before) / repeats

    def __call__(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        pair = [self.tactics.choose_one(name, [Runner(product)], None, [x_TC])[1] for product, name in enumerate(PRODUCTS)]
        if 2 in pair:
            raise RuntimeError("does not run here")
        load = int(ids_TK.flatten().bincount().max())
        self.clock += sum(self.time(load, tactic) for tactic in pair)
        return x_TC * (2 if 3 in pair else 1)


def tune(kernels: Kernels, most_tokens: int) -> dict[int, Any]:
    return kernels.tactics.tune(kernels, torch.zeros(8), experts=64, top_k=2, most_tokens=most_tokens)


def test_the_fastest_pair_wins_but_not_one_that_fails_or_is_wrong() -> None:
    kernels = Kernels(lambda load, tactic: {1: 60.0, 2: 1.0, 3: 1.0, 6: 70.0}.get(tactic, 100.0))
    assert tune(kernels, 32) == {16: (1, 6), 32: (1, 6)}


def test_what_is_fast_by_default_stays() -> None:
    assert tune(Kernels(lambda load, tactic: 50.0 if tactic == -1 else 100.0), 16) == {16: UNTUNED}


def test_many_tokens_must_be_fast_where_all_choose_the_same_experts_too() -> None:
    """Tactic 1 has small tiles: best for few tokens an expert, and terrible for many."""
    kernels = Kernels(lambda load, tactic: 10.0 * load if tactic == 1 else 200.0)
    tuned = tune(kernels, 768)
    assert tuned[16][0] == 1
    assert all(pair[0] != 1 for size, pair in tuned.items() if size >= PROMPT_TOKENS) and {512, 768} <= set(tuned)


def test_a_batch_runs_as_the_next_larger_that_was_tuned() -> None:
    tactics = ExpertTactics(lambda *asked: ("other", 9), lambda run, repeats: 0.0)
    assert tactics.find(5) == UNTUNED
    tactics.use({64: (2, 6), 16: (1, 5), 512: (3, 7)})
    assert [tactics.find(tokens) for tokens in (1, 16, 17, 64, 65, 512, 9000)] == [(1, 5), (1, 5), (2, 6), (2, 6), (3, 7), (3, 7), (3, 7)]
    runner = Runner(1)
    assert tactics.choose_one(PRODUCTS[1], [runner], None, [torch.zeros(40, 8)], gemm_idx=2) == (runner, 6)
    assert tactics.choose_one("fp4_gemm", [runner], None, []) == ("other", 9)


def test_it_takes_the_place_of_flashinfers() -> None:
    autotuner = pytest.importorskip("flashinfer.autotuner")
    from inference_service.kernels.expert_tactics import expert_tactics

    demanded = inspect.signature(autotuner.AutoTuner.choose_one).parameters
    assert list(demanded)[1:-1] == list(inspect.signature(ExpertTactics.choose_one).parameters)[1:-1]
    tactics = expert_tactics()
    tactics.use({16: (1, 5)})
    runner = Runner(0)
    assert autotuner.AutoTuner.get().choose_one(PRODUCTS[0], [runner], None, [torch.zeros(3, 8)], gemm_idx=1) == (runner, 1)
    tactics.use({})


class Module:
    """What FlashInfer compiles, as far as its Python code calls it: notes the tactics that it is given."""

    def __init__(self) -> None:
        self.called_with: list[Any] = []

    def build_and_load(self) -> Module:
        return self

    def init(self, *kind: Any) -> Module:
        return self

    def run_moe(self, *arguments: Any) -> None:
        self.called_with = [argument for argument in arguments if isinstance(argument, list)]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def test_flashinfer_asks_it_for_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("flashinfer.fused_moe.core")
    from inference_service.kernels.expert_tactics import expert_tactics

    module = Module()
    monkeypatch.setattr(core, "gen_cutlass_fused_moe_sm90_module", lambda *fast: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(core, "get_compute_capability", lambda device: (9, 0), raising=False)
    core.get_cutlass_fused_moe_module.cache_clear()
    expert_tactics().use({16: (1, 5), 32: (2, 6)})
    x_TC, ids_TK, weights_TK = torch.zeros(20, 8), torch.zeros(20, 2, dtype=torch.int32), torch.ones(20, 2)
    gate_up, down = torch.zeros(4, 32, 8), torch.zeros(4, 8, 16)
    core.cutlass_fused_moe(x_TC, ids_TK, weights_TK, gate_up, down, x_TC.dtype, quant_scales=None, output=x_TC.clone(), enable_pdl=True)
    core.get_cutlass_fused_moe_module.cache_clear()
    expert_tactics().use({})
    assert module.called_with == [[2, 6]]
