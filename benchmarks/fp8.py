"""Products with weights in FP8: the own Triton kernels against DeepGEMM, and bfloat16 beside them, at Qwen3-30B-A3B's shapes.

    python -m benchmarks.fp8

Sets GEMV_TOKENS, MOE_GEMV_TOKENS and MOE_OWN_TOKENS in kernels/flashinfer_fp8.py. Microseconds inside a CUDA graph; each call has weights
of its own, which the caches do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.kernels.timing import measure
from inference_service.kernels.flashinfer_fp8 import CutlassFp8Moe, DeepGemmFp8, GemvFp8, TritonFp8Moe
from inference_service.kernels.flashinfer_moe import GemvOrCutlassMoe
from inference_service.kernels.fp8 import E4M3, BlockFp8, as_bytes, quantize

PRODUCTS = {"qkv": (5120, 2048), "o": (2048, 4096), "gate_up": (22016, 2048), "down": (2048, 11008)}
EXPERTS, SIZE, HIDDEN, TOP_K = 128, 768, 2048, 8
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
MOST_GEMV = 128
Calls = Sequence[Callable[[], Tensor]]
LAYERS = 6
"""Copies of the weights of experts; products have as many as do not fit into the cache."""


def main() -> None:
    torch.manual_seed(0)
    print(f"{'':>12} {'tokens':>6} {'own':>8} {'DeepGEMM':>8} {'bfloat16':>8}")
    for name, (outputs, inputs) in PRODUCTS.items():
        copies = max(4, (128 << 20) // (outputs * inputs))
        plain = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        rounded = [quantize(weight) for weight in plain]
        for tokens in TOKENS:
            x_TK = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
            show(
                name,
                tokens,
                [partial(GemvFp8(), x_TK, weight) for weight in rounded],
                [partial(DeepGemmFp8(), x_TK, weight) for weight in rounded],
                [partial(F.linear, x_TK, weight) for weight in plain],
            )
    layers = [(random(EXPERTS, 2 * SIZE, HIDDEN), random(EXPERTS, HIDDEN, SIZE)) for _ in range(LAYERS)]
    packed = [(stacked(gate_up), stacked(down)) for gate_up, down in layers]
    for tokens in TOKENS:
        x_TC = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int() for _ in layers]
        weights_TK = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
        pairs: list[tuple[Any, Any]] = [(TritonFp8Moe(), packed), (CutlassFp8Moe(), packed), (GemvOrCutlassMoe(), layers)]
        own, deep_gemm, plain_calls = (
            [partial(moe, x_TC, *layer, ids_TK, weights_TK) for layer, ids_TK in zip(which, ids, strict=True)] for moe, which in pairs
        )
        show("experts", tokens, own, deep_gemm, plain_calls)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)


def stacked(weights: Tensor) -> BlockFp8:
    matrices = [quantize(weight) for weight in weights]
    values = torch.stack([as_bytes(matrix.values) for matrix in matrices]).view(E4M3)
    return BlockFp8(values, torch.stack([matrix.scales for matrix in matrices]))


def show(name: str, tokens: int, own: Calls, deep_gemm: Calls, plain: Calls) -> None:
    us = [
        measure(calls, torch.device("cuda"), capturable=True).us if calls is not own or tokens <= MOST_GEMV else float("nan")
        for calls in (own, deep_gemm, plain)
    ]
    print(f"{name:>12} {tokens:6} " + " ".join(f"{each:8.1f}" for each in us), flush=True)


if __name__ == "__main__":
    main()
