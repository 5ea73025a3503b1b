"""What is compiled after the start is counted."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from inference_service.kernels.compiles import CompileCounter


def test_graphs_of_torch_compile_are_counted() -> None:
    counter = CompileCounter()

    def increase(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled: Any = torch.compile(increase, backend="eager")
    for size in (2, 2, 3):
        assert compiled(torch.ones(size)).sum() == 2 * size
    assert counter.count == 2, "one for the first size, one for any"


def test_kernels_are_counted_and_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    knobs = pytest.importorskip("triton").knobs
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **details: seen.append(details["repr"]))
    counter = CompileCounter()
    with caplog.at_level(logging.WARNING):
        knobs.runtime.jit_post_compile_hook(key="", repr="_gemv[num_warps=4](*bf16)", fn=None, compile={}, is_manual_warmup=False)
    assert counter.count == 1 and "_gemv[num_warps=4](*bf16)" in caplog.text
    assert seen == ["_gemv[num_warps=4](*bf16)"], "the hook that was there is called as well"
