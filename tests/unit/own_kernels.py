"""A launch of each own kernel on odd shapes: for checks of the operators' schemas, and for compute-sanitizer (tests/gpu/sanitize.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inference_service.kernels.fp8 import BLOCK, E4M3, blocks

PAGES = 7


def launches(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The operator's name and its arguments. Rows, vocabularies and sizes are no multiples of a block wherever that is allowed."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, device=device, generator=generator).to(of)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    for outputs, inputs, tokens, biased in ((33, 100, 3, True), (128, 256, 1, False), (7, 17, 2, False)):
        yield "gemv", (random(tokens, inputs), random(outputs, inputs), random(outputs) if biased else None)
    for outputs, inputs, tokens, biased in ((192, 640, 3, True), (64, 128, 67, False)):
        yield "gemm_split", (random(tokens, inputs), random(outputs, inputs), random(outputs) if biased else None)
    for experts, top_k in ((9, 2), (60, 4), (128, 8)):
        yield "route", (random(5, experts), top_k, experts == 9)
    for hidden, size in ((100, 36), (128, 64), (128, 256)):
        ids, weights = ints(2, 0, 1, 2).view(2, 2), random(2, 2, of=torch.float32)
        for name in ("moe_gemv", "moe_grouped", "moe_tiled") if size == 256 else ("moe_gemv",):
            yield name, (random(2, hidden), random(3, 2 * size, hidden), random(3, hidden, size), ids, weights, hidden == 100)
    for outputs, inputs in ((64, 256), (192, 384)):
        yield "gemv_fp8", (random(2, inputs), random(outputs, inputs, of=E4M3), random(blocks(outputs), inputs // BLOCK, of=torch.float32))
    for tokens, outputs, inputs, splits in ((3, 192, 640, 8), (67, 64, 256, 1)):
        matrix = random(outputs, inputs, of=E4M3), random(blocks(outputs), inputs // BLOCK, of=torch.float32)
        yield "gemm_fp8_split", (random(tokens, inputs), *matrix, splits)
    for hidden, size in ((100, 128), (128, 256)):
        ids, weights = ints(2, 0, 1, 2).view(2, 2), random(2, 2, of=torch.float32)
        gate_up, down = random(3, 2 * size, hidden, of=E4M3), random(3, hidden, size, of=E4M3)
        scales = [random(3, blocks(outputs), blocks(inputs), of=torch.float32) for outputs, inputs in ((2 * size, hidden), (hidden, size))]
        for name in ("moe_gemv_fp8", "moe_grouped_fp8", "moe_tiled_fp8") if hidden == 128 else ("moe_gemv_fp8",):
            yield name, (random(2, hidden), gate_up, scales[0], down, scales[1], ids, weights, hidden == 100)
    positions, rows, pages = ints(0, 37, -1, -6, 16), ints(0, 1, 0, 1, 1), torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    for heads, kv_heads, head_dim, page_size, normed in ((6, 2, 64, 16, True), (3, 3, 32, 13, False)):
        norms = (random(head_dim), random(head_dim)) if normed else (None, None)
        table, cache = random(48, head_dim, of=torch.float32), random(PAGES, 2, kv_heads, page_size, head_dim)
        yield "append", (random(5, heads + 2 * kv_heads, head_dim), cache, *norms, 1e-6, table, positions, rows, pages)
    for heads, kv_heads, head_dim, page_size, splits in ((6, 2, 64, 16, 1), (3, 3, 64, 48, 4), (16, 1, 128, 64, 2)):
        q, cache = random(5, heads, head_dim), random(PAGES, 2, kv_heads, page_size, head_dim)
        yield "attend", (q, cache, positions, rows, pages, splits, torch.empty_like(q), head_dim**-0.5)
    for kv_heads, head_dim, page_size in ((2, 64, 16), (3, 96, 13)):
        cache, starts = random(PAGES, 2, kv_heads, page_size, head_dim), ints(0, page_size, page_size + 5, page_size + 8)
        yield "gather_contexts", (cache, ints(6, 0, 3), starts, random(2, page_size + 8, kv_heads, head_dim))
    for experts, top_k, groups, top_groups, sigmoid in ((15, 2, 3, 2, True), (64, 6, 1, 1, True), (160, 6, 8, 3, False)):
        bias = random(experts, of=torch.float32) if sigmoid else None
        yield "route_grouped", (random(5, experts), bias, top_k, groups, top_groups, sigmoid, experts == 15, 2.5)
    for experts, hidden in ((12, 33), (16, 3000)):
        yield "route_input", (random(5, experts), random(5, hidden))
    for heads, latent, rope, page_size, splits in ((6, 64, 16, 16, 1), (17, 32, 32, 48, 4)):
        cache, q, q_turned = random(PAGES, 1, 1, page_size, latent + rope), random(5, heads, latent), random(5, heads, rope)
        yield "mla_attend", (q, q_turned, cache, positions, rows, pages, splits, torch.empty_like(q), 0.1)
        table, queries = random(48, rope, of=torch.float32), random(5, heads, 24 + rope)
        yield "mla_append", (queries, random(5, latent + rope), random(latent), 1e-6, cache, table, positions, rows, pages)
    for vocabulary in (100, 4097):
        logits = random(3, vocabulary)
        yield "greedy", (logits,)
        draws = [torch.tensor(values, dtype=torch.float32, device=device) for values in ((0.0, 0.7, 1.3), (1.0, 0.9, 1.0), (0.0, 0.1, 0.0))]
        temperature, top_p, min_p = draws
        yield "draw", (logits, temperature, ints(0, 5, 50), top_p, min_p, torch.tensor([1, 2**40, -3], device=device), ints(3, 4, 5))
