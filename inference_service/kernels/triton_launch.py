"""What the own Triton kernels share: launches that are quick for the host, programmatic dependent launch, block sizes, and launches for
parts of many tokens.

With dependent launch a kernel's blocks are placed while the kernel before still drains. It is right beside any neighbour as long as each
kernel waits (`gdc_wait`) before it touches memory that another writes, and lets its successor start only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor


class Launched:
    """A Triton kernel that is launched like Triton's own, kernel[grid](*arguments, **constants), at a smaller cost to the host.

    Triton looks up what it has compiled by the text of all options, and asks the driver about each pointer, at each launch. Here it is
    found by what Triton compiles for: the constants, and the types and alignments of arguments, which stand first and in order.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}
        """The kernel, and the constants that it has among its arguments."""
        interpreted = not hasattr(jit, "device_caches")
        self._launch: Callable[..., None] = self._plainly if interpreted else self._find
        params = [] if interpreted else jit.params
        self._unaligned = [each.do_not_specialize or each.do_not_specialize_on_alignment for each in params]
        self._any_value = [each.do_not_specialize for each in params]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _plainly(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        self.jit[grid](*arguments, **constants)

    def _find(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        values: list[Any] = []
        key: list[Any] = [torch.cuda.current_device()]
        for place, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                if not argument.is_cuda:
                    return self._plainly(grid, *arguments, **constants)  # which says what is wrong
                value = argument.data_ptr()
                key.append(argument.dtype if value % 16 == 0 or self._unaligned[place] else (argument.dtype,))
                values.append(value)
            else:
                key.append(kind(argument, self._any_value[place]))
                values.append(argument)
        key += constants.values()
        found = self._compiled.get(tuple(key))
        if found:
            compiled, rest = found
            compiled[(*grid, 1, 1)[:3]](*values, *rest)
            return
        compiled = self.jit[grid](*arguments, **constants)
        self._compiled[tuple(key)] = compiled, [constants[name] for name in self.jit.arg_names[len(arguments) :]]


def kind(argument: Any, any_value: bool) -> Any:
    """What Triton compiles for, of what is no tensor: an integer's width, whether it is 1, and whether it is a multiple of 16."""
    if type(argument) is not int:
        return type(argument)
    narrow = -(2**31) <= argument < 2**31
    return narrow if any_value else (narrow, argument == 1, argument % 16 == 0)


@cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Launch options of a kernel that has the constexpr PDL."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def divisor(size: int, limit: int) -> int:
    """The largest power of two that divides `size`, at most `limit`."""
    return min(size & -size, limit)


def block(size: int, limit: int) -> int:
    """A power of two to cut `size` by: a divisor where that is wide enough for vector loads, else one that needs a mask at the end."""
    even = divisor(size, limit)
    return even if even >= 64 else min(limit, 1 << max(size - 1, 1).bit_length())


def in_parts(
    launch: Callable[[Tensor, Tensor, Tensor, Tensor], None], most_pairs: int, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """What experts' kernels write to y_TC, the last argument of `launch`, for so many pairs of a token and an expert at a time."""
    y_TC = torch.empty_like(x_TC)
    most = max(most_pairs // ids_TK.shape[1] // 16 * 16, 16)  # so that all parts begin where vectors of 16 bytes do
    if 0 < len(x_TC) <= most:  # views of parts would take the host some microseconds
        launch(x_TC, ids_TK, weights_TK, y_TC)
        return y_TC
    for first in range(0, len(x_TC), most):
        part = slice(first, first + most)
        launch(x_TC[part], ids_TK[part], weights_TK[part], y_TC[part])
    return y_TC
