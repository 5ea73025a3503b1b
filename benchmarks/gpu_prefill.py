"""Prefill on a GPU: what eager steps cost on host and device, what chunks cost beside decodes, and the experts by themselves.

    python -m benchmarks.gpu_prefill --config configs/h200.yaml --out results
    python -m benchmarks.gpu_prefill --config configs/h200.yaml --out results --set kernels.moe=triton+cutlass

Prompts with CUTLASS's experts are measured as `prebuild` with the same settings has tuned them, untuned, and untuned with FlashInfer's own
look-up of tactics, in one process. Writes prefill.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_decode import GREEDY, Bench, say
from inference_service.config import load_config
from inference_service.engine.step import StepPlan
from inference_service.execution.cuda_start import build_cuda_executor
from inference_service.execution.loading import load_model
from inference_service.fetch import resolve_model
from inference_service.kernels.expert_tactics import expert_tactics, microseconds
from inference_service.kernels.selection import multiplies_by_cutlass
from inference_service.models.layers import SparseMlp

PROMPTS = (1024, 2048, 4096, 8192)
DECODES = (8, 64, 224)
CHUNKS = (128, 256, 512, 1024, 2048, 4096)
AHEAD = 3
"""Steps that are queued when the device's time is taken."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = load_config(args.config, args.set)
    results: dict[str, Any] = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), "config": args.config, "set": args.set}

    def section(name: str, measure: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        results[name] = measure()
        say(f"{name} ({time.perf_counter() - begin:.1f} s): {json.dumps(results[name])}")
        (args.out / "prefill.json").write_text(json.dumps(results, indent=2))

    loaded = load_model(config, resolve_model(config.model.path), say)
    executor = build_cuda_executor(config, loaded, say)
    bench = Bench(executor, config, context=256, steps=32)
    sparse = next((layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, SparseMlp)), None)
    prompts = [tokens for tokens in PROMPTS if tokens <= config.batch.step_tokens]
    section("chunks beside decodes", partial(mixed, bench, config.batch.step_tokens, config.batch.max_requests))
    section("prompts", lambda: {tokens: eager(bench, tokens) for tokens in prompts})
    if sparse:
        section("experts", lambda: {tokens: experts(sparse, loaded.model.norm.weight_C, tokens) for tokens in (64, 128, 512, *prompts)})
    if multiplies_by_cutlass(loaded.choices):
        untuned(section, lambda: {tokens: eager(bench, tokens) for tokens in prompts})
    executor.close()


def untuned(section: Callable[[str, Callable[[], Any]], None], measure: Callable[[], Any]) -> None:
    tactics = expert_tactics()
    tuner: Any = getattr(tactics.otherwise, "__self__", None)  # FlashInfer's
    tactics.use({})
    section("prompts, untuned", measure)
    tuner.choose_one = tactics.otherwise
    section("prompts, untuned, FlashInfer's look-up", measure)
    tuner.choose_one = tactics.choose_one


def eager(bench: Bench, tokens: int) -> dict[str, float]:
    """ms until the first token of one prompt, of the host for the launch, and of the device for a step when others are queued before it."""
    alone = bench.prefill(tokens, 1)
    plans = [StepPlan([bench._prompt(slot, tokens)]) for slot in range(AHEAD + 1)]
    first, *others = [bench.executor.launch(plan) for plan in plans]
    first.wait()
    begin = time.perf_counter()
    for ticket in others:
        ticket.wait()
    return {**alone, "queued_ms": round(1e3 * (time.perf_counter() - begin) / AHEAD, 2)}


def mixed(bench: Bench, step_tokens: int, max_requests: int) -> dict[str, dict[str, float]]:
    """ms of a decode step, and of one with a chunk of a prompt beside; us that the chunk adds for each of its tokens."""
    found: dict[str, dict[str, float]] = {}
    for decodes in DECODES:
        if decodes >= max_requests:
            continue
        alone = bench.decode(decodes, GREEDY)["ms"]
        found[f"{decodes}"] = {"ms": alone}
        for chunk in CHUNKS:
            if decodes + chunk <= step_tokens:
                both = bench.mixed(chunk, decodes)["ms"]
                found[f"{decodes} + {chunk}"] = {"ms": both, "us_a_token": round(1e3 * (both - alone) / chunk, 1)}
    return found


@torch.inference_mode()
def experts(sparse: SparseMlp, like_C: torch.Tensor, tokens: int) -> dict[str, Any]:
    """us of a layer's experts where each token chooses at random, and where all choose alike."""
    count, top_k = sparse.config.experts, sparse.config.top_k
    x_TC = torch.randn(tokens, len(like_C), dtype=like_C.dtype, device=like_C.device)
    weights_TK = torch.full((tokens, top_k), 1 / top_k, device=like_C.device)
    uniform_TK = torch.rand(tokens, count, device=like_C.device).topk(top_k).indices.int()
    found: dict[str, Any] = {}
    for name, ids_TK in (("uniform", uniform_TK), ("alike", uniform_TK[:1].repeat(tokens, 1))):
        run = partial(sparse.experts, x_TC, ids_TK, weights_TK)
        run()
        us = microseconds(run, 4)
        found[f"{name}_us"] = round(us, 1)
        found[f"{name}_tflops"] = round(2e-6 * tokens * top_k * 3 * len(like_C) * sparse.config.intermediate_size / us, 1)
    return found


if __name__ == "__main__":
    main()
