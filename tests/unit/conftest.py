"""Lets Triton interpret its kernels where there is no GPU. It decides when it is imported, so this stands before any test's import."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def seeded() -> None:
    """Draws are the same each time: rounded to FP8, few of them would now and then lie too near to a tie."""
    torch.manual_seed(0)


@pytest.fixture
def loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes bounds of loops from arrays of one element, which numpy from 2.4 on refuses to take for a number."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch: Callable[[Any, Any], None] = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture
def nearest_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter drops the carry of a float32 that FP8 rounds up to the next power of two, and takes ties away from zero."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    from inference_service.kernels.fp8 import saturated

    convert: Callable[..., Any] = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) != ("fp32", "fp8e4nv"):
            return convert(values, source, target, rounding)
        return saturated(torch.from_numpy(values)).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)
