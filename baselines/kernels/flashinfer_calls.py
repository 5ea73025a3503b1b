"""Every call of FlashInfer that is measured and that no step of the service makes. Keyword arguments, since their order differs between
versions.

To be imported where FlashInfer is installed. Shapes as in `kernels.attention` and `case`.
"""

from __future__ import annotations

from typing import Any

import flashinfer.attention
import flashinfer.cascade
import flashinfer.cudnn
import flashinfer.decode
import flashinfer.fused_moe
import flashinfer.gemm
import flashinfer.page
import flashinfer.pod
import flashinfer.rope
import flashinfer.sampling
import torch
from torch import Tensor

from inference_service.kernels.flashinfer_ops import TUNE_MAX_TOKENS

WORKSPACE_BYTES = 512 << 20
"""For partial outputs of contexts that are split; batch POD has a half of it for decodes."""


def _workspace(like: Tensor) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=like.device)


def plan_decode(pages: Any, kv_P2HSD: Tensor, heads: int) -> Any:
    _, _, kv_heads, page_size, head_dim = kv_P2HSD.shape
    decode = flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper(
        float_workspace_buffer=_workspace(kv_P2HSD), kv_layout="HND", use_tensor_cores=False
    )
    decode.plan(
        indptr=pages.page_starts,
        indices=pages.pages,
        last_page_len=pages.last,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )
    return decode


def run_decode(decode: Any, q_THD: Tensor, kv_P2HSD: Tensor, o_THD: Tensor) -> None:
    decode.run(q=q_THD, paged_kv_cache=kv_P2HSD, out=o_THD)


def plan_holistic(pages: Any, kv_P2HSD: Tensor, heads: int) -> Any:
    _, _, kv_heads, page_size, head_dim = kv_P2HSD.shape
    holistic = flashinfer.attention.BatchAttention(kv_layout="HND")
    holistic.plan(
        qo_indptr=pages.starts,
        kv_indptr=pages.page_starts,
        kv_indices=pages.pages,
        kv_len_arr=pages.contexts,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        page_size=page_size,
        causal=True,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )
    return holistic


def run_holistic(holistic: Any, q_THD: Tensor, kv_P2HSD: Tensor, o_THD: Tensor) -> None:
    holistic.run(q=q_THD, kv_cache=kv_P2HSD, out=o_THD)


def plan_cascade(levels: list[Any], kv_P2HSD: Tensor, heads: int) -> Any:
    _, _, kv_heads, page_size, head_dim = kv_P2HSD.shape
    cascade = flashinfer.cascade.MultiLevelCascadeAttentionWrapper(
        num_levels=len(levels), float_workspace_buffer=_workspace(kv_P2HSD), kv_layout="HND"
    )
    cascade.plan(
        qo_indptr_arr=[level.starts for level in levels],
        paged_kv_indptr_arr=[level.page_starts for level in levels],
        paged_kv_indices_arr=[level.pages for level in levels],
        paged_kv_last_page_len=[level.last for level in levels],
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        causal=True,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )
    return cascade


def run_cascade(cascade: Any, q_THD: Tensor, kv_P2HSD: Tensor) -> Tensor:
    o_THD: Tensor = cascade.run(q=q_THD, paged_kv_cache=kv_P2HSD)
    return o_THD


def plan_pod(decodes: Any, kv_P2HSD: Tensor, heads: int) -> Any:
    _, _, kv_heads, page_size, head_dim = kv_P2HSD.shape
    pod = flashinfer.pod.PODWithPagedKVCacheWrapper(float_workspace_buffer=_workspace(kv_P2HSD), kv_layout="HND")
    pod.plan(
        indptr=decodes.page_starts,
        indices=decodes.pages,
        last_page_len=decodes.last,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )
    return pod


def run_pod(pod: Any, chunk_THD: Tensor, k_LHD: Tensor, v_LHD: Tensor, decode_THD: Tensor, kv_P2HSD: Tensor) -> tuple[Tensor, Tensor]:
    """The chunk's output and the decodes'."""
    chunk, decoded = pod.run(
        q_p=chunk_THD, k_p=k_LHD, v_p=v_LHD, q_d=decode_THD, paged_kv_cache_d=kv_P2HSD, causal_p=True, kv_layout_p="NHD"
    )
    return chunk, decoded


def plan_batch_pod(chunks: Any, decodes: Any, kv_P2HSD: Tensor, heads: int) -> Any:
    _, _, kv_heads, page_size, head_dim = kv_P2HSD.shape
    batch_pod = flashinfer.pod.BatchPODWithPagedKVCacheWrapper(float_workspace_buffer=_workspace(kv_P2HSD), kv_layout="HND")
    batch_pod.plan(
        qo_indptr_p=chunks.starts,
        kv_indptr_p=chunks.page_starts,
        kv_indices_p=chunks.pages,
        last_page_len_p=chunks.last,
        qo_indptr_d=decodes.starts,
        kv_indptr_d=decodes.page_starts,
        kv_indices_d=decodes.pages,
        last_page_len_d=decodes.last,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        q_data_type=kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
    )
    return batch_pod


def run_batch_pod(batch_pod: Any, chunk_THD: Tensor, decode_THD: Tensor, kv_P2HSD: Tensor) -> tuple[Tensor, Tensor]:
    """The chunks' output and the decodes'."""
    chunks, decoded = batch_pod.run(q_p=chunk_THD, paged_kv_cache_p=kv_P2HSD, q_d=decode_THD, paged_kv_cache_d=kv_P2HSD, causal_p=True)
    return chunks, decoded


def cudnn_decode(pages: Any, table: Tensor, workspace: Tensor, q_THD: Tensor, kv_P2HSD: Tensor, o_THD: Tensor) -> None:
    flashinfer.cudnn.cudnn_batch_decode_with_kv_cache(
        q=q_THD,
        k_cache=kv_P2HSD[:, 0],
        v_cache=kv_P2HSD[:, 1],
        scale=q_THD.shape[2] ** -0.5,
        workspace_buffer=workspace,
        max_sequence_kv=pages.longest_context,
        actual_seq_lens_kv=pages.contexts.view(-1, 1, 1, 1),
        block_tables=table,
        is_cuda_graph_compatible=True,
        out=o_THD,
    )


def cudnn_prefill(pages: Any, table: Tensor, workspace: Tensor, q_THD: Tensor, kv_P2HSD: Tensor, o_THD: Tensor) -> None:
    offsets = pages.starts * q_THD[0].numel()
    flashinfer.cudnn.cudnn_batch_prefill_with_kv_cache(
        q=q_THD,
        k_cache=kv_P2HSD[:, 0],
        v_cache=kv_P2HSD[:, 1],
        scale=q_THD.shape[2] ** -0.5,
        workspace_buffer=workspace,
        max_token_per_sequence=pages.longest,
        max_sequence_kv=pages.longest_context,
        actual_seq_lens_q=pages.lengths.view(-1, 1, 1, 1),
        actual_seq_lens_kv=pages.contexts.view(-1, 1, 1, 1),
        block_tables=table,
        causal=True,
        return_lse=False,
        batch_offsets_q=offsets,
        batch_offsets_o=offsets,
        is_cuda_graph_compatible=True,
        out=o_THD,
    )


def fp8_block_gemm(x_TK: Tensor, weight_NK: Tensor, scales: Tensor, y_TN: Tensor) -> Tensor:
    """Weights in FP8 with scales of blocks of 128 x 128; x is quantized within."""
    flashinfer.gemm.fp8_blockscale_gemm_sm90(input=x_TK, weight=weight_NK, weight_scale=scales, out=y_TN)
    return y_TN


def fp8_moe(x_TC: Tensor, gate_up: Tensor, down: Tensor, scales: list[Tensor], ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """CUTLASS's experts with FP8 weights and scales of blocks."""
    y_TC = torch.empty_like(x_TC)
    flashinfer.fused_moe.cutlass_fused_moe(
        input=x_TC,
        token_selected_experts=ids_TK,
        token_final_scales=weights_TK,
        fc1_expert_weights=gate_up,
        fc2_expert_weights=down,
        output_dtype=x_TC.dtype,
        quant_scales=scales,
        output=y_TC,
        use_deepseek_fp8_block_scale=True,
        tune_max_num_tokens=TUNE_MAX_TOKENS,
    )
    return y_TC


def sample(p_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Draw by FlashInfer alone, with one seed for all rows. A top_k of 0 and a top_p of 1 keep all."""
    if top_k and top_p < 1:
        ids_R = flashinfer.sampling.top_k_top_p_sampling_from_probs(probs=p_RV, top_k=top_k, top_p=top_p, seed=7, offset=0)
    elif top_p < 1:
        ids_R = flashinfer.sampling.top_p_sampling_from_probs(probs=p_RV, top_p=top_p, seed=7, offset=0)
    else:
        ids_R = flashinfer.sampling.sampling_from_probs(probs=p_RV, seed=7, offset=0)
    drawn: Tensor = ids_R
    return drawn


def rope(positions_T: Tensor, q_THD: Tensor, k_THD: Tensor, table_PD: Tensor) -> None:
    flashinfer.rope.apply_rope_with_cos_sin_cache_inplace(
        positions=positions_T, query=q_THD.flatten(1), key=k_THD.flatten(1), head_size=q_THD.shape[2], cos_sin_cache=table_PD, is_neox=True
    )


def append(k_THD: Tensor, v_THD: Tensor, row_T: Tensor, positions_T: Tensor, kv_P2HSD: Tensor, pages: Any) -> None:
    flashinfer.page.append_paged_kv_cache(
        append_key=k_THD,
        append_value=v_THD,
        batch_indices=row_T,
        positions=positions_T,
        paged_kv_cache=kv_P2HSD,
        kv_indices=pages.pages,
        kv_indptr=pages.page_starts,
        kv_last_page_len=pages.last,
        kv_layout="HND",
    )
