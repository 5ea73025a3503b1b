"""Products with weights in FP8: the own Triton kernels against DeepGEMM's, and bfloat16 beside them, at Qwen3-30B-A3B's shapes.

    python -m benchmarks.fp8

Sets GEMV_TOKENS and OWN_TOKENS in kernels/flashinfer_fp8.py, and FEW_TOKENS in kernels/flashinfer_moe.py. Microseconds inside a CUDA
graph; each call has weights of its own, which the caches do not hold. `gemv` streams a weight once a token, `own` once for 64, an expert's
for 16, `tiled` takes an expert's tokens in tiles; bound: the weights' bytes at 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from baselines.kernels.timing import measure
from inference_service.kernels.flashinfer_fp8 import CutlassFp8Moe, DeepGemmFp8
from inference_service.kernels.flashinfer_moe import TritonMoe
from inference_service.kernels.fp8 import E4M3, BlockFp8, as_bytes, quantize
from inference_service.kernels.triton_fp8 import gemv_fp8, moe_gemv_fp8
from inference_service.kernels.triton_grouped import moe_grouped_fp8
from inference_service.kernels.triton_split_gemm import gemm_fp8_split
from inference_service.kernels.triton_tiled import moe_tiled_fp8

PRODUCTS = {"qkv": (5120, 2048), "o": (2048, 4096), "gate_up": (22016, 2048), "down": (2048, 11008)}
EXPERTS, SIZE, HIDDEN, TOP_K = 128, 768, 2048, 8
TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
MOST_GEMV, MOST_OWN = 8, 256
Call = Callable[[], Tensor]
LAYERS = 6
"""Copies of the weights of experts; products have as many as do not fit into the cache."""
BYTES_A_US = 4.3e6


def main() -> None:
    torch.manual_seed(0)
    print(f"{'':>8} {'tokens':>6} {'bound':>8} {'gemv':>8} {'own':>8} {'tiled':>8} {'DeepGEMM':>8} {'bfloat16':>8}")
    for name, (outputs, inputs) in PRODUCTS.items():
        copies = max(4, (128 << 20) // (outputs * inputs))
        plain = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        rounded = [quantize(weight) for weight in plain]
        for tokens in TOKENS:
            x_TK = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
            gemv, own = ([partial(kernel, x_TK, each.values, each.scales) for each in rounded] for kernel in (gemv_fp8, gemm_fp8_split))
            deep_gemm = [partial(DeepGemmFp8(), x_TK, weight) for weight in rounded]
            show(name, tokens, outputs * inputs, gemv, own, [], deep_gemm, [partial(F.linear, x_TK, weight) for weight in plain])
    layers = [(random(EXPERTS, 2 * SIZE, HIDDEN), random(EXPERTS, HIDDEN, SIZE)) for _ in range(LAYERS)]
    packed = [(stacked(gate_up), stacked(down)) for gate_up, down in layers]
    for tokens in TOKENS:
        show_experts(tokens, layers, packed)


def show_experts(tokens: int, layers: Sequence[tuple[Tensor, Tensor]], packed: Sequence[tuple[BlockFp8, BlockFp8]]) -> None:
    x_TC = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    ids = [torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int() for _ in layers]
    weights_TK = torch.full((tokens, TOP_K), 1 / TOP_K, device="cuda")
    gemv, own, tiled = (
        [
            partial(kernel, x_TC, gate_up.values, gate_up.scales, down.values, down.scales, ids_TK, weights_TK, True)
            for (gate_up, down), ids_TK in zip(packed, ids, strict=True)
        ]
        for kernel in (moe_gemv_fp8, moe_grouped_fp8, moe_tiled_fp8)
    )
    makes: list[tuple[Any, Any]] = [(CutlassFp8Moe(), packed), (TritonMoe(), layers)]
    cutlass, plain = ([partial(moe, x_TC, *layer, ids_TK, weights_TK) for layer, ids_TK in zip(of, ids, strict=True)] for moe, of in makes)
    distinct = sum(len(set(each.flatten().tolist())) for each in ids) / len(ids)
    show("experts", tokens, distinct * 3 * SIZE * HIDDEN, gemv, own, tiled, cutlass, plain)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)


def stacked(weights: Tensor) -> BlockFp8:
    matrices = [quantize(weight) for weight in weights]
    values = torch.stack([as_bytes(matrix.values) for matrix in matrices]).view(E4M3)
    return BlockFp8(values, torch.stack([matrix.scales for matrix in matrices]))


def show(name: str, tokens: int, weight_bytes: float, gemv: Sequence[Call], own: Sequence[Call], *others: Sequence[Call]) -> None:
    """A line of the table."""
    timed = [(gemv, tokens <= MOST_GEMV), (own, tokens <= MOST_OWN), *((calls, bool(calls)) for calls in others)]
    us = [measure(calls, torch.device("cuda"), capturable=True).us if wanted else float("nan") for calls, wanted in timed]
    print(f"{name:>8} {tokens:6} {weight_bytes / BYTES_A_US:8.1f} " + " ".join(f"{each:8.1f}" for each in us), flush=True)


if __name__ == "__main__":
    main()
