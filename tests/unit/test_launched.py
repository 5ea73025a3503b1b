"""How `Launched` finds what was compiled. Triton is simulated; tests/gpu launches real kernels."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Launch = Callable[..., Any]


class Jit:
    """A kernel of x, y, size, count and BLOCK, of which Triton does not compile for the alignment of y, nor for the value of count."""

    arg_names = ("x", "y", "size", "count", "BLOCK")
    device_caches = ()

    def __init__(self) -> None:
        self.compiled, self.launched = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
        self.params = [
            SimpleNamespace(do_not_specialize=name == "count", do_not_specialize_on_alignment=name == "y") for name in self.arg_names
        ]

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        def compile_and_launch(*arguments: Any, **constants: Any) -> Jit:
            self.compiled.append((grid, arguments, constants))
            return Found(self)

        return compile_and_launch


class Found(Jit):
    """What was compiled."""

    def __init__(self, jit: Jit) -> None:
        self.jit = jit

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        return lambda *values: self.jit.launched.append((grid, values))


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return Jit()


def test_a_kind_is_compiled_once(jit: Jit) -> None:
    kernel = pytest.importorskip("inference_service.kernels.triton_launch").Launched(jit)
    x, y = torch.zeros(64), torch.zeros(64)
    kernel[(3,)](x, y, 33, 7, BLOCK=32, num_warps=4)
    for size, count, other in ((33, 7, y), (35, 16, y), (41, 1, y[1:])):
        kernel[(3, 2)](x[4:], other, size, count, BLOCK=32, num_warps=4)
        assert jit.launched.pop() == ((3, 2, 1), (x[4:].data_ptr(), other.data_ptr(), size, count, 32))
    assert len(jit.compiled) == 1


X = [{"x": torch.zeros(64)[1:]}, {"x": torch.zeros(64).half()}, {"x": None}]
NUMBERS = [{"size": 1}, {"size": 48}, {"size": 2**31 + 1}, {"size": 33.0}, {"count": 2**31}]
CONSTANTS = [{"BLOCK": 64}, {"num_warps": 8}]


@pytest.mark.parametrize("changed", [*X, *NUMBERS, *CONSTANTS])
def test_another_kind_is_compiled(jit: Jit, changed: dict[str, Any]) -> None:
    kernel = pytest.importorskip("inference_service.kernels.triton_launch").Launched(jit)
    for each in (changed, {}, changed):
        named = {"x": torch.zeros(64), "y": torch.zeros(64), "size": 33, "count": 7, "BLOCK": 32, "num_warps": 4} | each
        arguments = [named.pop(name) for name in ("x", "y", "size", "count")]
        kernel[(1,)](*arguments, **named)
    assert (len(jit.compiled), len(jit.launched)) == (2, 1)


def test_a_tensor_on_the_host_goes_to_triton_which_refuses_it(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("inference_service.kernels.triton_launch").Launched(jit)
    kernel[(1,)](torch.zeros(64), torch.zeros(64), 33, 7, BLOCK=32)
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    kernel[(1,)](torch.zeros(64), torch.zeros(64), 33, 7, BLOCK=32)
    assert (len(jit.compiled), len(jit.launched)) == (2, 0)
