"""Every call of FlashInfer's for steps attended to in one launch, as in `flashinfer_ops`.

To be imported where FlashInfer is installed. Shapes as in `attention`, and L tokens of a chunk's context.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import flashinfer.attention
import flashinfer.jit
import flashinfer.pod
import torch
from torch import Tensor

from inference_service.kernels.attention import AttentionSpec
from inference_service.kernels.custom_op import custom_op, nothing

LAYOUT = "HND"
"""Of the cache, where FlashInfer's text does not say by what name it is known."""

_WRAPPERS: list[Any] = []
"""Where plans lie; an operator is told which by its number."""


def is_compiled(backend: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether POD's module, or batch POD's, is there already for plain attention."""
    if backend == "pod":
        spec = flashinfer.jit.gen_pod_module(dtype, dtype, dtype, head_dim, 0, False, False, False, torch.int32, 0, False, False)
    else:
        spec = flashinfer.jit.gen_batch_pod_module(dtype, dtype, dtype, head_dim, 0, False, False, False, torch.int32, 0, False, False)
    return bool(spec.is_compiled)


def has_compiler() -> bool:
    """Whether there is an nvcc, where FlashInfer looks for it."""
    from torch.utils.cpp_extension import CUDA_HOME

    return Path(os.environ.get("FLASHINFER_NVCC") or f"{CUDA_HOME}/bin/nvcc").exists()


def make_batch_pod_wrapper(workspace: Tensor) -> int:
    """The number of a new wrapper of FlashInfer's POD for any number of chunks."""
    _WRAPPERS.append(flashinfer.pod.BatchPODWithPagedKVCacheWrapper(workspace, kv_layout="HND"))
    return len(_WRAPPERS) - 1


def plan_batch_pod(number: int, chunks: Any, decodes: Any, heads: int, kv_P2HSD: Tensor, spec: AttentionSpec) -> None:
    """Plan a step of causal attention; `chunks` and `decodes` are `flashinfer_pod.Rows`."""
    batch_pod_wrapper, (_, _, kv_heads, page_size, head_dim) = _WRAPPERS[number], kv_P2HSD.shape
    batch_pod_wrapper.plan(
        qo_indptr_p=chunks.starts,
        kv_indptr_p=chunks.page_starts,
        kv_indices_p=chunks.pages,
        last_page_len_p=chunks.last_page_lengths,
        qo_indptr_d=decodes.starts,
        kv_indptr_d=decodes.page_starts,
        kv_indices_d=decodes.pages,
        last_page_len_d=decodes.last_page_lengths,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        sm_scale=spec.scale,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )


@custom_op(lambda q_THD, *rest: torch.empty_like(q_THD))
def batch_pod(q_THD: Tensor, kv_P2HSD: Tensor, number: int, decodes: int) -> Tensor:
    batch_pod_wrapper = _WRAPPERS[number]
    chunks_THD, decoded_THD = batch_pod_wrapper.run(
        q_p=q_THD[decodes:], paged_kv_cache_p=kv_P2HSD, q_d=q_THD[:decodes], paged_kv_cache_d=kv_P2HSD, causal_p=True
    )
    return torch.cat((decoded_THD, chunks_THD))


def make_pod_wrapper(workspace: Tensor) -> int:
    """The number of a new wrapper of FlashInfer's POD for one chunk."""
    _WRAPPERS.append(flashinfer.pod.PODWithPagedKVCacheWrapper(workspace, kv_layout="HND"))
    return len(_WRAPPERS) - 1


def plan_pod(number: int, decodes: Any, heads: int, kv_P2HSD: Tensor, spec: AttentionSpec) -> None:
    """Plan the decodes of a step, `flashinfer_pod.Rows`."""
    pod_wrapper, (_, _, kv_heads, page_size, head_dim) = _WRAPPERS[number], kv_P2HSD.shape
    pod_wrapper.plan(
        indptr=decodes.page_starts,
        indices=decodes.pages,
        last_page_len=decodes.last_page_lengths,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        sm_scale=spec.scale,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )


@custom_op(lambda q_THD, *rest: torch.empty_like(q_THD))
def pod(q_THD: Tensor, kv_2LHD: Tensor, kv_P2HSD: Tensor, number: int, decodes: int, scale: float) -> Tensor:
    """`kv_2LHD`: the chunk's keys and values."""
    pod_wrapper, o_THD = _WRAPPERS[number], torch.empty_like(q_THD)
    # FlashInfer clears what its blocks count with on the default stream, whatever stream they run on. So they run on that one, and all
    # that is allocated there is used there alone.
    current, default = torch.cuda.current_stream(q_THD.device), torch.cuda.default_stream(q_THD.device)
    default.wait_stream(current)
    with torch.cuda.stream(default):
        chunk_THD, decoded_THD = pod_wrapper.run(
            q_p=q_THD[decodes:],
            k_p=kv_2LHD[0],
            v_p=kv_2LHD[1],
            q_d=q_THD[:decodes],
            paged_kv_cache_d=kv_P2HSD,
            causal_p=True,
            kv_layout_p="NHD",
            sm_scale_p=scale,
            sm_scale_d=scale,
        )
        torch.cat((decoded_THD, chunk_THD), out=o_THD)
    current.wait_stream(default)
    return o_THD


def make_batch_attention() -> int:
    """The number of a new wrapper of FlashInfer's BatchAttention, which has a workspace of its own."""
    _WRAPPERS.append(flashinfer.attention.BatchAttention(kv_layout=LAYOUT))
    return len(_WRAPPERS) - 1


def plan_batch_attention(number: int, rows: Any, heads: int, kv_P2HSD: Tensor, spec: AttentionSpec) -> None:
    """Plan a step of causal attention; `rows` are `flashinfer_pod.Rows`."""
    holistic_wrapper, (_, _, kv_heads, page_size, head_dim) = _WRAPPERS[number], kv_P2HSD.shape
    holistic_wrapper.plan(
        qo_indptr=rows.starts,
        kv_indptr=rows.page_starts,
        kv_indices=rows.pages,
        kv_len_arr=rows.contexts,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        page_size=page_size,
        causal=True,
        sm_scale=spec.scale,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )


@custom_op(nothing, mutates=("o_THD",))
def batch_attention(q_THD: Tensor, kv_P2HSD: Tensor, number: int, o_THD: Tensor) -> None:
    holistic_wrapper = _WRAPPERS[number]
    holistic_wrapper.run(q=q_THD, kv_cache=kv_P2HSD, out=o_THD)
