"""Products in FP8 before the first request: DeepGEMM compiles each kernel when it first meets it, in seconds, and keeps it on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch

from inference_service.execution.loading import LoadedModel, Report
from inference_service.execution.tuning import cache_directory
from inference_service.models.decoder import Decoder
from inference_service.models.experts import Fp8Experts
from inference_service.models.layers import SparseMlp
from inference_service.models.linear import Fp8Linear

FEW = (16, 24, 31, 64)
"""Up to where it chooses other kernels for few tokens; beyond, it does so by the number of tiles of 128 tokens, and from 1024 tokens on
anew."""
TILE, MANY = 128, 1024


def sizes(most_tokens: int) -> list[int]:
    """Numbers of tokens that have a kernel each, or more than others share one."""
    every = {*FEW, MANY - 1, *range(TILE, most_tokens, TILE), most_tokens}
    return sorted(size for size in every if size <= most_tokens)


@torch.inference_mode()
def load_deep_gemm(loaded: LoadedModel, most_tokens: int, progress: Report) -> None:
    """Run each product of the model once for each kernel that it may need."""
    kinds = {"gemm_fp8": Fp8Linear, "moe_fp8": Fp8Experts}
    rows = [choice.row for choice in loaded.choices if choice.row.operator in kinds]
    using = tuple(kinds[row.operator] for row in rows if "flashinfer" in row.requires)
    if not using:
        return
    folder = os.environ.setdefault("TRTLLM_DG_CACHE_DIR", str(cache_directory() / "deep-gemm"))
    begin, count, device = time.perf_counter(), 0, loaded.target.device
    progress(f"loading DeepGEMM's kernels, which takes minutes where {folder} lacks them")
    for part in _distinct(loaded.model, using):
        for tokens in sizes(most_tokens):
            if isinstance(part, Fp8Linear):
                part(torch.zeros(tokens, part.inputs, dtype=loaded.dtype, device=device))
            else:
                moe = loaded.shape.moe
                assert moe is not None
                ids_TK = torch.rand(tokens, moe.experts, device=device).topk(moe.top_k).indices.int()
                x_TC = torch.zeros(tokens, loaded.shape.hidden_size, dtype=loaded.dtype, device=device)
                part(x_TC, ids_TK, torch.ones(ids_TK.shape, device=device))
            count += 1
    torch.cuda.synchronize()
    progress(f"{count} products in FP8 ran in {time.perf_counter() - begin:.1f} s")


def _distinct(model: Decoder, kinds: tuple[type, ...]) -> Iterator[Fp8Linear | Fp8Experts]:
    """One of each shape, of these kinds."""
    seen = set()
    for part in _parts(model):
        if not isinstance(part, kinds):
            continue
        matrices = (part.matrix,) if isinstance(part, Fp8Linear) else (part.gate_up, part.down)
        if (key := tuple(matrix.values.shape for matrix in matrices)) not in seen:
            seen.add(key)
            yield part


def _parts(model: Decoder) -> Iterator[Fp8Linear | Fp8Experts]:
    for layer in model.layers:
        shared = layer.mlp.shared if isinstance(layer.mlp, SparseMlp) else None
        for owner in filter(None, (layer.attention, layer.mlp, shared)):
            yield from (part for part in vars(owner).values() if isinstance(part, Fp8Linear | Fp8Experts))
