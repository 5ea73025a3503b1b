"""Experts for a few tokens: the own Triton kernels against FlashInfer's CUTLASS, at Qwen3-30B-A3B's shape, bfloat16.

    python -m benchmarks.moe_small [--sweep]

Sets GEMV_TOKENS in kernels/flashinfer_moe.py. TB/s are of the weights of the distinct experts, which must be read.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.gpu_timing import graph_us
from inference_service.kernels.expert_tactics import expert_tactics
from inference_service.kernels.flashinfer_moe import CutlassMoe
from inference_service.kernels.triton_moe import DEFAULT, Tiles, launch

GEMV: Any = launch
HIDDEN, EXPERTS, SIZE, TOP_K, LAYERS = 2048, 128, 768, 8, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles at 1 and 4 tokens")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    weights = [
        [
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16).mul_(0.02)
            for shape in ((EXPERTS, 2 * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE))
        ]
        for _ in range(LAYERS)
    ]
    cutlass = CutlassMoe()

    def inputs(tokens: int) -> list[Any]:
        made = []
        for gate_up, down in weights:
            scores, ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)
            x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
            made.append((x, gate_up, down, ids.int(), scores / scores.sum(-1, keepdim=True)))
        return made

    begin = time.perf_counter()
    gate_up, down = weights[0]
    tactics = expert_tactics().tune(
        lambda x_TC, ids_TK, weights_TK: cutlass(x_TC, gate_up, down, ids_TK, weights_TK), gate_up[0, 0], EXPERTS, TOP_K, 32
    )
    expert_tactics().use(tactics)
    print(f"CUTLASS tuned in {time.perf_counter() - begin:.1f} s: {tactics}", flush=True)

    for tokens in (1, 2, 4, 8, 16, 32):
        layers = inputs(tokens)
        distinct = sum(len(set(ids.flatten().tolist())) for _, _, _, ids, _ in layers) / LAYERS
        terabytes = distinct * 3 * SIZE * HIDDEN * 2 / 1e12
        for name, calls in (
            ("triton", [partial(GEMV, *layer, True) for layer in layers]),
            ("cutlass", [partial(cutlass, *layer) for layer in layers]),
        ):
            if tokens > 16 and name == "triton":
                continue
            us = graph_us(calls)
            print(f"{tokens:3} tokens, {distinct:5.1f} experts: {name:8} {us:7.1f} us {terabytes / us * 1e6:5.2f} TB/s", flush=True)

    if arguments.sweep:
        sweep(inputs(1), inputs(4))


def sweep(one: list[Any], four: list[Any]) -> None:
    """Vary one kernel's tiles at a time."""
    gate_up = [Tiles(gate_up_rows=r, gate_up_columns=c, gate_up_warps=w) for r, c, w in product((2, 4, 8), (256, 512, 1024), (2, 4, 8))]
    down = [Tiles(down_rows=r, down_columns=c, down_warps=w) for r, c, w in product((2, 4, 8), (128, 256), (1, 2, 4))]
    for tiles in [DEFAULT, *gate_up, *down]:
        times = [graph_us([partial(GEMV, *layer, True, tiles) for layer in layers], 10) for layers in (one, four)]
        print(f"{times[0]:7.1f} us {times[1]:7.1f} us  {tiles}", flush=True)


if __name__ == "__main__":
    main()
