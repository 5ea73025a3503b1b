"""Compiles the FlashInfer kernels that the service calls, for $FLASHINFER_CUDA_ARCH_LIST (such as "9.0a 10.0a"), into the package itself.

Run while the image is built, where there is nvcc and need be no GPU: `python build_kernels.py`. What FlashInfer finds there it never
compiles anew. What depends on more than a head's size (XQA) is compiled for the models of ../pools; anything else by `prebuild`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from flashinfer.aot import copy_built_kernels
from flashinfer.jit import build_jit_specs
from flashinfer.jit import env as jit_env
from flashinfer.jit.activation import gen_act_and_mul_module
from flashinfer.jit.attention import gen_batch_mla_module, gen_batch_pod_module, gen_batch_prefill_module, gen_fmha_v2_module
from flashinfer.jit.core import JitSpec
from flashinfer.jit.fused_moe import (
    gen_cutlass_fused_moe_sm89_module,
    gen_cutlass_fused_moe_sm90_module,
    gen_cutlass_fused_moe_sm100_module,
)
from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.sampling import gen_sampling_module
from flashinfer.jit.spdlog import gen_spdlog_module
from flashinfer.jit.tinygemm2 import gen_tinygemm2_module
from flashinfer.jit.xqa import gen_xqa_module

DTYPE, INDEX = torch.bfloat16, torch.int32
HEAD_DIMS = (64, 128, 256)
XQA_SHAPES = ((64, 128, 8), (64, 128, 4))
"""Page size, head size, query heads a KV head: Qwen3-30B-A3B's and Llama 3.1 8B's."""
LATENT, ROPE, KEY, VALUE = 512, 64, 192, 128
"""DeepSeek's sizes: a latent, a rotated key, and a head's keys and values."""


def modules(architectures: frozenset[str]) -> Iterator[JitSpec]:
    """What kernels/flashinfer_ops.py needs on these architectures, written like 9.0."""
    yield from (gen_spdlog_module(), gen_norm_module(), gen_sampling_module())
    yield from (gen_act_and_mul_module("silu"), gen_act_and_mul_module("gelu_tanh"))
    hopper, blackwell = "9.0" in architectures, bool(architectures & {"10.0", "10.3"})
    for backend in ("fa2", "fa3") if hopper else ("fa2",):
        for size in HEAD_DIMS:
            for window in (False, True):
                for soft_cap in (False, True):
                    yield gen_batch_prefill_module(backend, DTYPE, DTYPE, DTYPE, INDEX, size, size, 0, window, soft_cap, False)
        yield gen_batch_mla_module(backend, DTYPE, DTYPE, DTYPE, INDEX, LATENT, ROPE, False)
        yield gen_batch_prefill_module(backend, DTYPE, DTYPE, DTYPE, INDEX, KEY, VALUE, 0, False, False, False)
    yield gen_batch_pod_module(DTYPE, DTYPE, DTYPE, 128, 0, False, False, False, INDEX, 0, False, False)
    if "8.9" in architectures:
        yield gen_cutlass_fused_moe_sm89_module()
    if hopper:
        yield gen_cutlass_fused_moe_sm90_module()
        yield gen_fp8_blockscale_gemm_sm90_module()
        yield gen_fmha_v2_module("Q_PAGED_KV_HND", DTYPE, DTYPE)
    if blackwell:
        yield gen_cutlass_fused_moe_sm100_module()
    if hopper or blackwell:
        yield gen_tinygemm2_module()
        for page_size, head_dim, group in XQA_SHAPES:
            yield gen_xqa_module(DTYPE, DTYPE, page_size, head_dim, group, False, DTYPE)


def main() -> None:
    architectures = frozenset(name.rstrip("af") for name in os.environ["FLASHINFER_CUDA_ARCH_LIST"].split())
    specs = list(modules(architectures))
    build_jit_specs(specs, verbose=False, skip_prebuilt=False)
    copy_built_kernels(specs, jit_env.FLASHINFER_AOT_DIR)
    print(f"{len(specs)} modules for {', '.join(sorted(architectures))} in {jit_env.FLASHINFER_AOT_DIR}")


if __name__ == "__main__":
    main()
