"""A product for all matrices of the checkpoint that read the same input, plain or in FP8.

`weights()` maps checkpoint names to views of its own memory, into which a loader copies. Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.fp8 import BLOCK, BlockFp8, Fp8Gemm, blocks
from inference_service.models.build import Build
from inference_service.models.config_json import ModelError
from inference_service.models.fp8 import SCALES

ROWS = 64
"""FP8 kernels want a multiple of it."""


class Linear:
    """Plain matrices, stacked in the order of `outputs`."""

    def __init__(self, build: Build, outputs: dict[str, int], inputs: int, bias: bool = False) -> None:
        self.gemm = build.operators.gemm
        self.outputs = outputs
        self.weight = build.empty(sum(outputs.values()), inputs)
        self.bias = build.empty(sum(outputs.values())) if bias else None

    def weights(self) -> dict[str, Tensor]:
        views, first = {}, 0
        for name, size in self.outputs.items():
            views[f"{name}.weight"] = self.weight[first : first + size]
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias[first : first + size]
            first += size
        return views

    def reorder(self, order: Tensor) -> None:
        """Let row `order[i]` be row i, for the first rows."""
        for tensor in (self.weight, self.bias):
            if tensor is not None:
                tensor[: len(order)] = tensor[order]

    def pack(self) -> None:
        self.weight = self.gemm.pack(self.weight)

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self.gemm(x_TK, self.weight, self.bias)


class Fp8Linear:
    """The same in FP8. Each matrix begins a block of rows, and inputs fill up their last block; what is between is 0 and not given out."""

    def __init__(self, build: Build, gemm: Fp8Gemm, outputs: dict[str, int], inputs: int, bias: bool) -> None:
        self.gemm, self.outputs, self.inputs = gemm, outputs, inputs
        self.starts, end = [], 0
        for size in outputs.values():
            self.starts.append(blocks(end) * BLOCK)
            end = self.starts[-1] + size
        self.matrix: BlockFp8 = build.zeros_fp8(-(-end // ROWS) * ROWS, blocks(inputs) * BLOCK)
        self.bias = build.empty(sum(outputs.values())) if bias else None
        places = [torch.arange(start, start + size) for start, size in zip(self.starts, outputs.values(), strict=True)]
        self.row_N = torch.cat(places).to(build.device)
        """Where each output stands."""
        self.filled = len(self.row_N) < len(self.matrix.values)

    def weights(self) -> dict[str, Tensor]:
        views, first = {}, 0
        for start, (name, size) in zip(self.starts, self.outputs.items(), strict=True):
            views[f"{name}.weight"] = self.matrix.values[start : start + size, : self.inputs]
            views[f"{name}.weight{SCALES}"] = self.matrix.scales[start // BLOCK :][: blocks(size)]
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias[first : first + size]
            first += size
        return views

    def reorder(self, order: Tensor) -> None:
        """As `Linear`'s. Raises ModelError where a row would leave its block."""
        order = order.to(self.row_N.device)
        new, old = self.row_N[: len(order)], self.row_N[order]
        if not torch.equal(new // BLOCK, old // BLOCK):
            wanted = "this model needs kernels.gemm_fp8: dequantized"
            raise ModelError(f"{next(iter(self.outputs))}: heads are put in another order, which leaves blocks of FP8; {wanted}")
        bytes_NK = self.matrix.values.view(torch.uint8)
        bytes_NK[new] = bytes_NK[old]
        if self.bias is not None:
            self.bias[: len(order)] = self.bias[order]

    def pack(self) -> None:
        pass

    def __call__(self, x_TK: Tensor) -> Tensor:
        if missing := self.matrix.values.shape[1] - self.inputs:
            x_TK = F.pad(x_TK, (0, missing))
        y_TN = self.gemm(x_TK, self.matrix)
        if self.filled:
            y_TN = y_TN.index_select(1, self.row_N)
        return y_TN if self.bias is None else y_TN.add_(self.bias)


def linear(build: Build, outputs: dict[str, int], inputs: int, bias: bool = False) -> Linear | Fp8Linear:
    """Of a layer, in FP8 where that is wanted and can be computed with."""
    if build.fp8 and build.operators.gemm_fp8:
        return Fp8Linear(build, build.operators.gemm_fp8, outputs, inputs, bias)
    return Linear(build, outputs, inputs, bias)
