"""Every call of FlashInfer that a step makes, each a custom operator. Keyword arguments, since their order differs between versions.

To be imported where FlashInfer is installed. Shapes: T tokens, R rows, B decode rows, C hidden size, N outputs, I intermediate size,
V vocabulary; otherwise as in `attention`.
"""

from __future__ import annotations

from typing import Any

import flashinfer.activation
import flashinfer.decode
import flashinfer.fused_moe
import flashinfer.gemm
import flashinfer.mla
import flashinfer.norm
import flashinfer.prefill
import flashinfer.sampling
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.attention import AttentionSpec
from inference_service.kernels.custom_op import custom_op, nothing
from inference_service.kernels.fp8 import E4M3
from inference_service.kernels.gemm import fits_cute_dsl

TUNE_MAX_TOKENS = 8192
"""The largest batch that experts are tuned for; larger ones run as it does. FlashInfer keeps the first value of a process for good."""


@custom_op(lambda x_TC, weight_C, eps, zero_centered: torch.empty_like(x_TC))
def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """`zero_centered`: the norm's weights are 1 + `weight_C`."""
    y_TC: Tensor
    if zero_centered:
        y_TC = flashinfer.norm.gemma_rmsnorm(input=x_TC, weight=weight_C, eps=eps)
    else:
        y_TC = flashinfer.norm.rmsnorm(input=x_TC, weight=weight_C, eps=eps)
    return y_TC


@custom_op(nothing, mutates=("x_TC", "residual_TC"))
def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, zero_centered: bool) -> None:
    """Add x to the residual, and put the residual's norm into x."""
    if zero_centered:
        flashinfer.norm.gemma_fused_add_rmsnorm(input=x_TC, residual=residual_TC, weight=weight_C, eps=eps)
    else:
        flashinfer.norm.fused_add_rmsnorm(input=x_TC, residual=residual_TC, weight=weight_C, eps=eps)


def _half(gate_up_T2I: Tensor) -> Tensor:
    return gate_up_T2I.new_empty(*gate_up_T2I.shape[:-1], gate_up_T2I.shape[-1] // 2)


@custom_op(_half)
def silu_and_mul(gate_up_T2I: Tensor) -> Tensor:
    y_TI: Tensor = flashinfer.activation.silu_and_mul(input=gate_up_T2I)
    return y_TI


@custom_op(_half)
def gelu_tanh_and_mul(gate_up_T2I: Tensor) -> Tensor:
    y_TI: Tensor = flashinfer.activation.gelu_tanh_and_mul(input=gate_up_T2I)
    return y_TI


def _linear(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
    return x_TC.new_empty(len(x_TC), len(weight_NC))


@custom_op(_linear)
def tinygemm(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
    y_TN = _linear(x_TC, weight_NC, bias_N)
    flashinfer.gemm.tinygemm_bf16(input=x_TC, weight=weight_NC, out=y_TN, bias=bias_N)
    return y_TN


@custom_op(_linear)
def cute_dsl_gemm(x_TC: Tensor, weight_NC: Tensor, bias_N: Tensor | None) -> Tensor:
    if not fits_cute_dsl(x_TC, weight_NC):
        return F.linear(x_TC, weight_NC, bias_N)
    y_TN: Tensor = flashinfer.gemm.mm_bf16(a=x_TC, b=weight_NC.T, bias=bias_N, backend="cute-dsl")
    return y_TN


@custom_op(lambda x_TC, gate_up_E2IC, down_ECI, ids_TK, weights_TK: torch.empty_like(x_TC))
def cutlass_moe(x_TC: Tensor, gate_up_E2IC: Tensor, down_ECI: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    y_TC = torch.empty_like(x_TC)
    flashinfer.fused_moe.cutlass_fused_moe(
        input=x_TC,
        token_selected_experts=ids_TK,
        token_final_scales=weights_TK,
        fc1_expert_weights=gate_up_E2IC,
        fc2_expert_weights=down_ECI,
        output_dtype=x_TC.dtype,
        quant_scales=None,
        output=y_TC,
        tune_max_num_tokens=TUNE_MAX_TOKENS,
    )
    return y_TC


@custom_op(lambda x_TK, weight_NK, scales: x_TK.new_empty(len(x_TK), len(weight_NK)))
def fp8_block_gemm(x_TK: Tensor, weight_NK: Tensor, scales: Tensor) -> Tensor:
    y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
    flashinfer.gemm.fp8_blockscale_gemm_sm90(input=x_TK.contiguous(), weight=weight_NK, weight_scale=scales, out=y_TN)
    return y_TN


@custom_op(lambda x_TC, *rest: torch.empty_like(x_TC))
def cutlass_moe_fp8(
    x_TC: Tensor,
    gate_up_E2IC: Tensor,
    gate_up_scales: Tensor,
    down_ECI: Tensor,
    down_scales: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """The same with weights in FP8, in blocks of 128 x 128."""
    y_TC = torch.empty_like(x_TC)
    flashinfer.fused_moe.cutlass_fused_moe(
        input=x_TC,
        token_selected_experts=ids_TK,
        token_final_scales=weights_TK,
        fc1_expert_weights=gate_up_E2IC,
        fc2_expert_weights=down_ECI,
        output_dtype=x_TC.dtype,
        quant_scales=[gate_up_scales, down_scales],
        output=y_TC,
        use_deepseek_fp8_block_scale=True,
        tune_max_num_tokens=TUNE_MAX_TOKENS,
    )
    return y_TC


@custom_op(nothing, mutates=("o_BHD", "workspace"))
def xqa(
    q_BHD: Tensor,
    kv_P2HSD: Tensor,
    pages_BM: Tensor,
    contexts_B: Tensor,
    max_context: int,
    scale: float,
    o_BHD: Tensor,
    workspace: Tensor,
) -> None:
    flashinfer.decode.xqa_batch_decode_with_kv_cache(
        query=q_BHD,
        kv_cache=kv_P2HSD,
        workspace_buffer=workspace,
        block_tables=pages_BM,
        seq_lens=contexts_B,
        max_seq_len=max_context,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        out=o_BHD,
        kv_layout="HND",
    )


@custom_op(nothing, mutates=("o_THD", "workspace"))
def fmha_v2(
    q_THD: Tensor,
    kv_P2HSD: Tensor,
    pages_RM: Tensor,
    contexts_R: Tensor,
    starts_q: Tensor,
    starts_kv: Tensor,
    max_length: int,
    max_context: int,
    scale: float,
    o_THD: Tensor,
    workspace: Tensor,
) -> None:
    flashinfer.prefill.trtllm_fmha_v2_prefill(
        qkv=(q_THD, kv_P2HSD),
        input_layout="Q_PAGED_KV_HND",
        workspace_buffer=workspace,
        seq_lens=contexts_R,
        max_q_len=max_length,
        max_kv_len=max_context,
        bmm1_scale=scale,
        bmm2_scale=1.0,
        batch_size=len(contexts_R),
        cum_seq_lens_q=starts_q,
        cum_seq_lens_kv=starts_kv,
        block_tables=pages_RM,
        out=o_THD,
        mask_mode="causal",
    )


_WRAPPERS: list[Any] = []
"""Where plans lie; an operator is told which by its number. Kept for good, as the kernels are that they load."""


def make_wrapper(workspace: Tensor, backend: str) -> int:
    """The number of a new wrapper of FlashInfer's FA2 or FA3."""
    _WRAPPERS.append(flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend=backend))
    return len(_WRAPPERS) - 1


def plan_paged(
    number: int,
    starts: Tensor,
    page_starts: Tensor,
    pages: Tensor,
    last_page_lengths: Tensor,
    contexts: Tensor,
    longest: int,
    heads: int,
    kv_P2HSD: Tensor,
    spec: AttentionSpec,
) -> None:
    """Plan a step of causal attention; indices are int32, and on the host but for `pages`."""
    wrapper, (_, _, kv_heads, page_size, head_dim) = _WRAPPERS[number], kv_P2HSD.shape
    wrapper.plan(
        qo_indptr=starts,
        paged_kv_indptr=page_starts,
        paged_kv_indices=pages,
        paged_kv_last_page_len=last_page_lengths,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim,
        page_size=page_size,
        causal=True,
        sm_scale=spec.scale,
        window_left=-1 if spec.window is None else spec.window - 1,
        logits_soft_cap=spec.soft_cap,
        # Beside a cache in FP8, queries are bfloat16, as the support table has it.
        q_data_type=torch.bfloat16 if kv_P2HSD.dtype == E4M3 else kv_P2HSD.dtype,
        kv_data_type=kv_P2HSD.dtype,
        seq_lens=contexts,
        max_token_per_sequence=longest,
    )


@custom_op(nothing, mutates=("o_THD",))
def paged_attention(q_THD: Tensor, kv_P2HSD: Tensor, number: int, o_THD: Tensor) -> None:
    wrapper = _WRAPPERS[number]
    wrapper.run(q=q_THD, paged_kv_cache=kv_P2HSD, out=o_THD)


def make_mla_wrapper(workspace: Tensor, backend: str) -> int:
    """The number of a new wrapper of FlashInfer's FA2 or FA3 for latents."""
    _WRAPPERS.append(flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend))
    return len(_WRAPPERS) - 1


def make_mla_graph_wrapper(workspace: Tensor, backend: str, rows: int, pages: int, twin: int | None) -> int:
    """The number of one for CUDA graphs of so many rows: each of its plans, of `pages` pages at most, is copied to the same places.

    `twin`: one for other graphs, none of which is ever planned before these have run. Plans of both are then copied through the same memory
    and to the same, 8 MiB each, which FlashInfer has no argument for.
    """
    starts, page_starts, indices, contexts = (
        torch.empty(count, dtype=torch.int32, device=workspace.device) for count in (rows + 1, rows + 1, pages, rows)
    )
    mla_wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        workspace,
        use_cuda_graph=True,
        qo_indptr=starts,
        kv_indptr=page_starts,
        kv_indices=indices,
        kv_len_arr=contexts,
        backend=backend,
    )
    if twin is not None:
        for buffer in ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer"):
            setattr(mla_wrapper, buffer, getattr(_WRAPPERS[twin], buffer))
    _WRAPPERS.append(mla_wrapper)
    return len(_WRAPPERS) - 1


def plan_mla(
    number: int,
    starts: Tensor,
    page_starts: Tensor,
    pages: Tensor,
    contexts: Tensor,
    heads: int,
    latent: int,
    kv_P11SD: Tensor,
    scale: float,
) -> None:
    """Plan a step of causal attention to latents; indices are int32, and on the host but for `pages`."""
    mla_wrapper, (_, _, _, page_size, size) = _WRAPPERS[number], kv_P11SD.shape
    mla_wrapper.plan(
        qo_indptr=starts,
        kv_indptr=page_starts,
        kv_indices=pages,
        kv_len_arr=contexts,
        num_heads=heads,
        head_dim_ckv=latent,
        head_dim_kpe=size - latent,
        page_size=page_size,
        causal=True,
        sm_scale=scale,
        q_data_type=kv_P11SD.dtype,
        kv_data_type=kv_P11SD.dtype,
    )


@custom_op(nothing, mutates=("o_THL",))
def mla_paged(q_THL: Tensor, q_THR: Tensor, kv_P11SD: Tensor, number: int, o_THL: Tensor) -> None:
    mla_wrapper, kv_PSD, latent = _WRAPPERS[number], kv_P11SD[:, 0, 0], q_THL.shape[2]
    mla_wrapper.run(q_nope=q_THL, q_pe=q_THR, ckv_cache=kv_PSD[..., :latent], kpe_cache=kv_PSD[..., latent:], out=o_THL)


def make_ragged_wrapper(workspace: Tensor, backend: str) -> int:
    """The number of a new wrapper of FlashInfer's FA2 or FA3 for keys and values outside of the cache.

    FA3 multiplies values of the row behind with 0: all must be finite, else one request could spoil another.
    """
    _WRAPPERS.append(flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD", backend=backend))
    return len(_WRAPPERS) - 1


def plan_ragged(
    number: int,
    starts: Tensor,
    context_starts: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    scale: float,
    dtype: torch.dtype,
) -> None:
    """Plan a step of causal attention to keys and values outside of the cache; indices are int32, and on the host."""
    ragged_wrapper = _WRAPPERS[number]
    ragged_wrapper.plan(
        qo_indptr=starts,
        kv_indptr=context_starts,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=value_dim,
        causal=True,
        sm_scale=scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )


@custom_op(nothing, mutates=("o_THV",))
def ragged_attention(q_THQ: Tensor, k_KHQ: Tensor, v_KHV: Tensor, number: int, o_THV: Tensor) -> None:
    ragged_wrapper = _WRAPPERS[number]
    ragged_wrapper.run(q_THQ, k_KHQ, v_KHV, out=o_THV)


def _routed(logits_TE: Tensor, bias_E: Tensor, groups: int, top_groups: int, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    size = len(logits_TE), top_k
    return logits_TE.new_empty(size), logits_TE.new_empty(size, dtype=torch.int32)


@custom_op(_routed)
def fused_topk_deepseek(logits_TE: Tensor, bias_E: Tensor, groups: int, top_groups: int, top_k: int, scale: float) -> tuple[Tensor, Tensor]:
    """weights_TK, which sum to `scale`, and int32 ids_TK. Logits and bias are of one dtype."""
    weights_TK, ids_TK = _routed(logits_TE, bias_E, groups, top_groups, top_k, scale)
    flashinfer.fused_moe.fused_topk_deepseek(
        scores=logits_TE,
        bias=bias_E,
        n_group=groups,
        topk_group=top_groups,
        topk=top_k,
        routed_scaling_factor=scale,
        topk_values=weights_TK,
        topk_indices=ids_TK,
    )
    return weights_TK, ids_TK


@custom_op(lambda p_RV, top_k_R: torch.empty_like(p_RV))
def top_k_renorm(p_RV: Tensor, top_k_R: Tensor) -> Tensor:
    """Keep each row's top k probabilities, and scale them to sum to 1. k is in [1, V]."""
    kept_RV: Tensor = flashinfer.sampling.top_k_renorm_probs(probs=p_RV, top_k=top_k_R)
    return kept_RV


@custom_op(lambda p_RV, top_p_R: torch.empty_like(p_RV))
def top_p_renorm(p_RV: Tensor, top_p_R: Tensor) -> Tensor:
    """The same for the fewest most probable tokens that reach top_p."""
    kept_RV: Tensor = flashinfer.sampling.top_p_renorm_probs(probs=p_RV, top_p=top_p_R, is_deterministic=True)
    return kept_RV
