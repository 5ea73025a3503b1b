"""Products of a few tokens: cuBLAS, the own Triton kernel and FlashInfer's tinygemm, at Qwen3-30B-A3B's shapes, bfloat16.

    python -m benchmarks.gemm_small [--tinygemm] [--sweep]

Sets GEMV_TOKENS in kernels/small_gemm.py. --tinygemm: compiles it where no prebuilt kernel is there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_timing import graph_us
from inference_service.kernels.triton_gemm import gemv

SHAPES = {"router": (128, 2048), "qkv": (5120, 2048), "o": (2048, 4096), "lm_head": (151936, 2048)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tinygemm", action="store_true")
    parser.add_argument("--sweep", action="store_true", help="try other tiles at 1 token")
    arguments = parser.parse_args()
    backends: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cublas": F.linear, "triton": lambda x, weight: gemv(x, weight, None)}
    if arguments.tinygemm:
        from inference_service.kernels.small_gemm import TinyGemm

        tiny = TinyGemm()
        backends["tinygemm"] = lambda x, weight: tiny(x, weight, None)

    for name, (outputs, inputs) in SHAPES.items():
        size = outputs * inputs * 2
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) for _ in range(min(128, max(3, (400 << 20) // size)))]
        for tokens in (1, 2, 4, 8, 32):
            x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
            for backend, run in backends.items():
                if tokens > 8 and backend != "cublas":
                    continue
                us = graph_us([partial(run, x, weight) for weight in weights])
                print(f"{name:8} {tokens:3} tokens: {backend:9} {us:7.2f} us {size / us / 1e6:5.2f} TB/s", flush=True)
        if arguments.sweep:
            x = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
            for rows, columns, warps in product((1, 2, 4, 8), (256, 512, 1024), (2, 4, 8)):
                calls = [partial(gemv, x, weight, None, rows, columns, warps) for weight in weights]
                print(f"{name:8} rows {rows}, columns {columns:4}, warps {warps}: {graph_us(calls, 10):7.2f} us", flush=True)


if __name__ == "__main__":
    main()
