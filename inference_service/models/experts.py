"""The experts of a sparse layer, plain or in FP8: their weights, and their products.

Shapes: T tokens, C hidden size, E experts, K experts a token, I an expert's intermediate size.
"""

from __future__ import annotations

from torch import Tensor

from inference_service.kernels.fp8 import BLOCK, BlockFp8, Fp8Moe, blocks
from inference_service.models.build import Build
from inference_service.models.config import MoeConfig
from inference_service.models.fp8 import SCALES


class Experts:
    """Plain weights; gate and up of an expert stand in the order of the operator's `halves`."""

    def __init__(self, build: Build, moe: MoeConfig, hidden: int) -> None:
        self.moe = build.operators.moe
        self.gate_up = build.empty(moe.experts, 2 * moe.intermediate_size, hidden)
        self.down = build.empty(moe.experts, hidden, moe.intermediate_size)

    def weights(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for expert, (gate_up_2IC, down_CI) in enumerate(zip(self.gate_up, self.down, strict=True)):
            parts = dict(zip(self.moe.halves, gate_up_2IC.chunk(2), strict=True)) | {"down": down_CI}
            # One order whatever the backend's, so that random weights do not depend on it.
            views |= {f"experts.{expert}.{name}_proj.weight": parts[name] for name in ("gate", "up", "down")}
        return views

    def pack(self) -> None:
        self.gate_up, self.down = self.moe.pack(self.gate_up, self.down)

    def __call__(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.moe(x_TC, self.gate_up, self.down, ids_TK, weights_TK)


class Fp8Experts:
    """The same in FP8. I fills up its last block: what is added is 0, and stays so behind gate and up."""

    def __init__(self, build: Build, operator: Fp8Moe, moe: MoeConfig, hidden: int) -> None:
        self.moe, self.size = operator, moe.intermediate_size
        whole = blocks(self.size) * BLOCK
        self.gate_up: BlockFp8 = build.zeros_fp8(moe.experts, 2 * whole, hidden)
        self.down: BlockFp8 = build.zeros_fp8(moe.experts, hidden, whole)

    def weights(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for expert in range(len(self.down.values)):
            values, scales = (dict(zip(self.moe.halves, both[expert].chunk(2), strict=True)) for both in _pair(self.gate_up))
            matrices = {name: (values[name][: self.size], scales[name]) for name in ("gate", "up")}
            matrices["down"] = self.down.values[expert, :, : self.size], self.down.scales[expert]
            for name, (part, part_scales) in matrices.items():
                views |= {f"experts.{expert}.{name}_proj.weight": part, f"experts.{expert}.{name}_proj.weight{SCALES}": part_scales}
        return views

    def pack(self) -> None:
        pass

    def __call__(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self.moe(x_TC, self.gate_up, self.down, ids_TK, weights_TK)


def _pair(matrix: BlockFp8) -> tuple[Tensor, Tensor]:
    return matrix.values, matrix.scales


def experts(build: Build, moe: MoeConfig, hidden: int) -> Experts | Fp8Experts:
    """Of a layer, in FP8 where that is wanted and can be computed with."""
    if build.fp8 and build.operators.moe_fp8:
        return Fp8Experts(build, build.operators.moe_fp8, moe, hidden)
    return Experts(build, moe, hidden)
