"""Which kernels `prebuild` tunes. CUTLASS's are simulated here; tests/gpu tunes real ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inference_service import prebuild
from inference_service.config import load_config
from inference_service.execution.loading import load_model
from inference_service.kernels import support
from inference_service.kernels.expert_tactics import PRODUCTS, ExpertTactics
from inference_service.kernels.moe import TorchMoe
from inference_service.kernels.selection import Choice
from tests.gpu.tiny import save_tiny
from tests.unit.test_expert_tactics import Runner


class Cutlass:
    """CUTLASS's experts, as far as their tactics are asked for; each is faster the higher its number is."""

    def __init__(self) -> None:
        self.tactics = ExpertTactics(lambda *asked: ("other", 9), lambda run, repeats: self.time(run))
        self.pair: list[int] = []

    def time(self, run: object) -> float:
        return 100.0 - sum(self.pair)

    def __call__(self, x_TC: Tensor, gate_up: Tensor, down: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self.pair = [self.tactics.choose_one(name, [Runner(product)], None, [x_TC])[1] for product, name in enumerate(PRODUCTS)]
        return TorchMoe()(x_TC, gate_up, down, ids_TK, weights_TK)


def test_experts_are_tuned_where_another_backend_is_preferred_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `triton+cutlass`, whose own kernels take the smallest sizes of them all."""
    save_tiny("qwen3-moe", tmp_path)
    config = load_config(None, ["device.kind=cpu", "batch.max_step_tokens=64", "batch.max_requests=4"])
    loaded = load_model(config, tmp_path, lambda text: None)
    row = next(row for row in support.rows("moe") if row.backend == "triton+cutlass")
    cutlass = Cutlass()
    monkeypatch.setattr(prebuild, "CutlassMoe", lambda: cutlass)
    monkeypatch.setattr(prebuild, "expert_tactics", lambda: cutlass.tactics)
    with torch.inference_mode():
        assert prebuild.tune_experts(config, loaded, lambda text: None) == {}, "none of these runs on a CPU"
        found = prebuild.tune_experts(config, replace(loaded, choices=[Choice(row, "")]), lambda text: None)
    assert found == dict.fromkeys((16, 32, 64), (3, 7))
