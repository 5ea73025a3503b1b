"""What `prebuild` tunes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from inference_service.config import load_config
from inference_service.execution.loading import load_model
from inference_service.kernels.expert_tactics import PRODUCTS, expert_tactics
from inference_service.prebuild import tune_experts
from tests.gpu.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("backend", ["triton+cutlass", "cutlass", "triton"])
def test_experts(tmp_path: Path, backend: str) -> None:
    """CUTLASS's for all sizes, though the own kernels may take the smallest of them; where all are own there is nothing to tune."""
    save_tiny("qwen3-moe", tmp_path)
    config = load_config(None, ["device.kind=cuda", "batch.max_step_tokens=64", f"kernels.moe={backend}"])
    expert_tactics().valid.clear()  # of what this process has tuned before
    tactics = tune_experts(config, load_model(config, tmp_path, print), print)
    cutlass = backend != "triton"
    assert list(tactics) == ([16, 32, 64] if cutlass else []) and set(expert_tactics().valid) == (set(PRODUCTS) if cutlass else set())
