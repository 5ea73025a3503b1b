"""Dense products at the model's weights, in the model's dtype and in FP8.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from baselines.kernels.case import FP8_TOLERANCE, TENSORRT_LLM, Backend, Bench, Call, Case, Operator, Work, absent, up_to
from baselines.kernels.fp8 import E4M3, IN_BLOCKS, OWN_IN_BLOCKS, to_blocks, to_tensor
from inference_service.kernels import support
from inference_service.kernels.flashinfer_fp8 import TritonFp8Gemm
from inference_service.kernels.fp8 import BlockFp8
from inference_service.kernels.small_gemm import TINY_TOKENS, TritonGemm, own_kernel
from inference_service.kernels.support_row import FLASHINFER, GPUS, HALVES, NO_HALF, NO_TRITON, TRITON, Row

OWN_TOKENS, OWN_FP8_TOKENS = 128, 256
"""Beyond so many tokens the own kernels are not run, which are for some dozens; likewise those for weights in FP8."""
FP8_GPUS = frozenset({"sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121"})
BLACKWELL_ONLY = "FlashInfer's group-wise and block-scaled FP8 products by CUTLASS are for sm_100 and newer"


@dataclass(frozen=True)
class Product:
    x_TK: Tensor
    weight_NK: Tensor


def packed(made: Any, copies: list[Product], bench: Bench) -> list[Call]:
    return [partial(made, copy.x_TK, made.pack(copy.weight_NK), None) for copy in copies]


class Gemm(Operator):
    name = "gemm"

    def weights(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the model's products, by name."""
        shape = self.bench.shape
        heads = shape.heads * shape.head_dim
        named = {
            "qkv": (heads + 2 * shape.kv_heads * shape.head_dim, shape.hidden_size),
            "o": (shape.hidden_size, heads),
            "lm_head": (shape.vocab_size, shape.hidden_size),
        }
        if shape.moe:
            return named | {"router": (shape.moe.experts, shape.hidden_size)}
        size = shape.intermediate_size
        return named | {"gate_up": (2 * size, shape.hidden_size), "down": (shape.hidden_size, size)}

    def cases(self) -> list[Case]:
        grid = self.bench.grid
        return [
            Case(name, {"tokens": tokens})
            for name in self.weights()
            for tokens in (grid.few_tokens if name == "lm_head" else (*grid.few_tokens, *grid.prefills))
        ]

    def work(self, case: Case) -> Work:
        (outputs, inputs), tokens, size = self.weights()[case.kind], case.sizes["tokens"], self.bench.dtype.itemsize
        return Work(
            flops=2.0 * tokens * outputs * inputs,
            bytes=float(size * (outputs * inputs + tokens * (inputs + outputs))),
            precision=support.dtype_name(self.bench.dtype),
        )

    def make(self, case: Case, copies: int) -> list[Product]:
        outputs, inputs = self.weights()[case.kind]
        return [
            Product(self.bench.normal(case.sizes["tokens"], inputs), self.bench.normal(outputs, inputs).mul_(0.05)) for _ in range(copies)
        ]

    def reference(self, inputs: Product) -> Tensor:
        return inputs.x_TK.float() @ inputs.weight_NK.float().T

    def backends(self) -> list[Backend]:
        rows = {row.backend: row for row in support.rows(self.name)}
        own = Row(self.name, "triton", TritonGemm, GPUS - {"sm_75"}, HALVES, NO_TRITON, NO_HALF, requires=FLASHINFER | TRITON)
        return [
            Backend(rows["torch"], packed, note="cuBLAS on a GPU"),
            Backend(own, packed, self._limit_own),
            Backend(rows["onednn"], packed),
            Backend(rows["cute-dsl"], packed),
            Backend(rows["tinygemm"], packed, up_to(TINY_TOKENS)),
        ]

    def _limit_own(self, case: Case) -> str:
        fits = own_kernel(case.sizes["tokens"], *self.weights()[case.kind])
        return up_to(OWN_TOKENS)(case) if fits else "has no kernel for this shape"


class Fp8Gemm(Gemm):
    """Weights in FP8; the reference has them unrounded."""

    name = "gemm_fp8"

    def cases(self) -> list[Case]:
        weights = self.weights()
        even = [name for name in ("qkv", "o", "gate_up", "down") if name in weights and not any(size % 128 for size in weights[name])]
        return [Case(name, {"tokens": count}) for name in even for count in self.bench.grid.fp8_tokens]

    def work(self, case: Case) -> Work:
        (outputs, inputs), tokens, size = self.weights()[case.kind], case.sizes["tokens"], self.bench.dtype.itemsize
        return replace(super().work(case), bytes=float(outputs * inputs + size * tokens * (inputs + outputs)), precision="float8")

    def backends(self) -> list[Backend]:
        block = Row(self.name, "deepgemm", BlockGemm, frozenset({"sm_90"}), frozenset({torch.bfloat16}), requires=FLASHINFER)
        block = replace(block, elsewhere="Hopper's block-scaled FP8 products are for sm_90", otherwise="its inputs are bfloat16")
        scaled = Row(self.name, "cublas", ScaledGemm, FP8_GPUS, HALVES, "GPUs multiply FP8 from sm_89 up", NO_HALF)
        elsewhere = Row(self.name, "cutlass", absent, frozenset(), HALVES, BLACKWELL_ONLY)
        own = replace(next(row for row in support.rows(self.name) if row.backend == "triton"), make=OwnBlockGemm)
        return [
            Backend(own, packed, up_to(OWN_FP8_TOKENS), FP8_TOLERANCE, note=OWN_IN_BLOCKS),
            Backend(scaled, self._scaled, tolerance=FP8_TOLERANCE, note="one scale a tensor; inputs are in FP8 already"),
            Backend(block, packed, tolerance=FP8_TOLERANCE, note=IN_BLOCKS),
            Backend(replace(block, backend="tensorrt-llm", make=TrtllmBlockGemm, requires=TENSORRT_LLM), packed, tolerance=FP8_TOLERANCE),
            Backend(elsewhere, packed),
        ]

    def _scaled(self, made: Any, copies: list[Product], bench: Bench) -> list[Call]:
        return [partial(made, *to_tensor(copy.x_TK), *to_tensor(copy.weight_NK), bench.dtype) for copy in copies]


class ScaledGemm:
    """PyTorch's product of FP8 tensors, which is cuBLAS."""

    def __call__(self, x_TK: Tensor, x_scale: Tensor, weight_NK: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
        assert x_TK.dtype == weight_NK.dtype == E4M3
        return torch._scaled_mm(x_TK, weight_NK.T, scale_a=x_scale, scale_b=weight_scale, out_dtype=dtype)


class TrtllmBlockGemm:
    """TensorRT-LLM's own block-scaled product; inputs are quantized before."""

    def __init__(self) -> None:
        import_module("tensorrt_llm")  # which registers the operators
        self._ops: Any = torch.ops.trtllm

    def pack(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        return to_blocks(weight_NK)

    def __call__(self, x_TK: Tensor, packed: tuple[Tensor, Tensor], bias_N: None) -> Tensor:
        quantized_TK, scales = self._ops.fp8_quantize_1x128(x_TK)
        y_TN: Tensor = self._ops.fp8_block_scaling_gemm(quantized_TK, packed[0], scales, packed[1])
        return y_TN


class OwnBlockGemm:
    """The own kernels for weights in FP8 blocks."""

    def __init__(self) -> None:
        self._call = TritonFp8Gemm()

    def pack(self, weight_NK: Tensor) -> BlockFp8:
        return BlockFp8(*to_blocks(weight_NK))

    def __call__(self, x_TK: Tensor, packed: BlockFp8, bias_N: None) -> Tensor:
        return self._call(x_TK, packed)


class BlockGemm:
    """FlashInfer's block-scaled product, which is DeepGEMM's."""

    def __init__(self) -> None:
        from baselines.kernels import flashinfer_calls

        self._call: Callable[..., Tensor] = flashinfer_calls.fp8_block_gemm

    def pack(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        return to_blocks(weight_NK)

    def __call__(self, x_TK: Tensor, packed: tuple[Tensor, Tensor], bias_N: None) -> Tensor:
        y_TN = x_TK.new_empty(len(x_TK), len(packed[0]))
        return self._call(x_TK, *packed, y_TN)
