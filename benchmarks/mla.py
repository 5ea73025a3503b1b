"""Decodes attending to latents: the own Triton kernel against FlashInfer's FA2 and FA3, at Moonlight's and DeepSeek-V3's heads.

    python -m benchmarks.mla

To say which backend of `mla_decode` should stand first in kernels/support_latent.py, and up to how many rows `triton+fa3` takes which.
Microseconds inside a CUDA graph, each call on latents that the caches do not hold; in brackets the share of the memory bound, at 4.3 TB/s.
`plan`: to plan a step of FA3's and copy that to the device.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from baselines.kernels.timing import measure
from inference_service.kernels.attention import AttentionSpec, StepLayout
from inference_service.kernels.flashinfer_mla import LATENT, ROPE, FlashInferLatent
from inference_service.kernels.mla_paged import TritonLatentDecode

HEADS = {"Moonlight": 16, "DeepSeek-V3": 128}
BATCHES, CONTEXTS, PAGE_SIZE = (1, 8, 32, 128), (512, 4096, 16384), 64
SPEC = AttentionSpec(scale=(128 + ROPE) ** -0.5)
BYTES_A_US = 4.3e6


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    flashinfer = {name: FlashInferLatent(name, prefills=False) for name in ("fa2", "fa3")}
    backends: dict[str, Any] = {"triton": TritonLatentDecode()} | flashinfer
    print(f"{'':>12} {'batch':>5} {'context':>7} " + " ".join(f"{name:>14}" for name in backends) + f" {'plan':>8}")
    for batch in BATCHES:
        for context in CONTEXTS:
            layout, caches = decodes(batch, context), latents(batch, context)
            bound = batch * context * (LATENT + ROPE) * 2 / BYTES_A_US
            for name, heads in HEADS.items():
                us = [time_us(backend, layout, caches, heads) for backend in backends.values()]
                timed = " ".join(f"{each:8.1f} ({bound / each:3.0%})" for each in us)
                print(f"{name:>12} {batch:5} {context:7} {timed} {plan_us(flashinfer['fa3'], layout, caches[0], heads):8.1f}", flush=True)


def decodes(batch: int, context: int) -> StepLayout:
    """Rows whose pages are shuffled."""
    width = context // PAGE_SIZE
    pages_RM = torch.randperm(batch * width, device="cuda").int().view(batch, width)
    contexts_R = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    rows_T = torch.arange(batch, dtype=torch.int32, device="cuda")
    return StepLayout(batch, [1] * batch, [context] * batch, contexts_R - 1, rows_T, pages_RM, contexts_R, captured=True)


def latents(batch: int, context: int) -> list[Tensor]:
    """A layer's, and more until they are twice the L2 cache together."""
    shape = batch * context // PAGE_SIZE, 1, 1, PAGE_SIZE, LATENT + ROPE
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(1 + (64 << 20) // (batch * context * (LATENT + ROPE)))]


def time_us(backend: Any, layout: StepLayout, caches: list[Tensor], heads: int) -> float:
    # Strided as what passes W_UK is.
    q_THL = torch.randn(heads, len(layout.lengths), LATENT, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    q_THR, o_THL = torch.randn(len(layout.lengths), heads, ROPE, device="cuda", dtype=torch.bfloat16), torch.empty_like(q_THL)
    if isinstance(backend, FlashInferLatent):
        backend.plan_replay(layout, caches[0], heads, SPEC)
    plan = backend.plan(layout, caches[0], heads, SPEC)
    return measure([partial(backend, q_THL, q_THR, kv, plan, o_THL) for kv in caches], q_THL.device, capturable=True).us


def plan_us(backend: FlashInferLatent, layout: StepLayout, kv: Tensor, heads: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        backend.plan_replay(layout, kv, heads, SPEC)
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - begin) / 20


if __name__ == "__main__":
    main()
