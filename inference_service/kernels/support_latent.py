"""Rows of the support table for what DeepSeek's families need: attention to latents, routing by groups; and Llama 4's routing."""

from __future__ import annotations

from functools import partial

from inference_service.kernels import flashinfer_mla, grouped_routing, input_routing, mla_append, mla_paged, mla_torch
from inference_service.kernels.support_row import (
    CUTLASS_MOE,
    FLASHINFER,
    GPUS,
    HALVES,
    NO_HALF,
    NO_TRITON,
    TRITON,
    Row,
    Setting,
)
from inference_service.kernels.versions import at_least

HOPPER = frozenset({"sm_90"})
NO_FA3 = "FA3 is written for Hopper's instructions, which sm_90 alone has"
NO_FA2 = "a multiprocessor of sm_75 has too little shared memory for latents"


def _powers_of_two(setting: Setting) -> str:
    shape = setting.latent
    if shape is None or all(size >= 16 and size & (size - 1) == 0 for size in (shape.latent, shape.rope)):
        return ""
    return f"takes a kv_lora_rank and a qk_rope_head_dim that are powers of two from 16 up, not {shape.latent} and {shape.rope}"


def _flashinfer(setting: Setting) -> str:
    shape = setting.latent
    if shape is None or (shape.latent, shape.rope) == (flashinfer_mla.LATENT, flashinfer_mla.ROPE):
        return ""
    return f"takes a kv_lora_rank of 512 and a qk_rope_head_dim of 64, not {shape.latent} and {shape.rope}"


def _graphs(setting: Setting) -> str:
    """FlashInfer from 0.7 on wants exactly the pages of each context, where a graph's rows have those of its table; and each plan makes a
    new backend, where a graph goes on with what it was captured from."""
    version = setting.versions.get("flashinfer")
    if version and at_least(version, "0.7"):
        return f"is planned for CUDA graphs as FlashInfer before 0.7 does it, not {version}"
    return _flashinfer(setting)


def _ragged(setting: Setting) -> str:
    shape = setting.latent
    if shape is None or (shape.nope + shape.rope, shape.value) == (flashinfer_mla.HEAD_DIM, flashinfer_mla.VALUE_DIM):
        return _flashinfer(setting)
    return f"takes heads of 192 with values of 128, not {shape.nope + shape.rope} with {shape.value}"


def _fused_topk(setting: Setting) -> str:
    """As FlashInfer 0.6.13 checks it."""
    spec = setting.grouped
    if spec is None:
        return ""
    if not (spec.sigmoid and spec.renormalize):
        return "has sigmoid scores that are scaled to sum to 1, not others"
    if spec.top_k > min(8, spec.groups * spec.top_groups):
        return f"takes a top_k of at most 8 and of n_group x topk_group, {spec.groups} x {spec.top_groups} here, not {spec.top_k}"
    members = spec.experts // spec.groups
    if spec.groups > 1 and (members > 32 or members * spec.top_groups > 128):
        return f"takes at most 32 experts a group, and 128 in the chosen groups, not {members} and {members * spec.top_groups}"
    return "takes at most 384 experts" if spec.experts > 384 else ""


LATENT_ROWS = (
    Row(
        "mla_decode",
        "triton+fa3",
        flashinfer_mla.TritonOrFa3Latent,
        architectures=HOPPER,
        dtypes=HALVES,
        elsewhere=NO_FA3,
        otherwise=NO_HALF,
        limit=_graphs,
        requires=TRITON | FLASHINFER,
    ),
    Row(
        "mla_decode",
        "triton",
        mla_paged.TritonLatentDecode,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        limit=_powers_of_two,
        requires=TRITON,
    ),
    Row(
        "mla_decode",
        "fa3",
        partial(flashinfer_mla.FlashInferLatent, "fa3", prefills=False),
        architectures=HOPPER,
        dtypes=HALVES,
        elsewhere=NO_FA3,
        otherwise=NO_HALF,
        limit=_graphs,
        requires=FLASHINFER,
    ),
    Row(
        "mla_decode",
        "fa2",
        partial(flashinfer_mla.FlashInferLatent, "fa2", prefills=False),
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_FA2,
        otherwise=NO_HALF,
        limit=_graphs,
        requires=FLASHINFER,
    ),
    Row("mla_decode", "torch", mla_torch.TorchLatentDecode, graph=False),
    Row(
        "mla_prefill",
        "fa3",
        partial(flashinfer_mla.FlashInferMlaPrefill, "fa3"),
        architectures=HOPPER,
        dtypes=HALVES,
        elsewhere=NO_FA3,
        otherwise=NO_HALF,
        limit=_ragged,
        requires=FLASHINFER,
        graph=False,
    ),
    Row(
        "mla_prefill",
        "fa2",
        partial(flashinfer_mla.FlashInferMlaPrefill, "fa2"),
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_FA2,
        otherwise=NO_HALF,
        limit=_ragged,
        requires=FLASHINFER,
        graph=False,
    ),
    Row("mla_prefill", "torch", mla_torch.TorchMlaPrefill, graph=False),
    Row(
        "mla_prefill",
        "triton",
        mla_paged.triton_mla_prefill,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        limit=_powers_of_two,
        requires=TRITON,
    ),
    Row(
        "mla_mixed",
        "triton",
        mla_paged.triton_mla_mixed,
        architectures=GPUS - {"sm_75"},
        dtypes=HALVES,
        elsewhere=NO_TRITON,
        otherwise=NO_HALF,
        limit=_powers_of_two,
        requires=TRITON,
    ),
    Row("mla_mixed", "torch", mla_torch.torch_mla_mixed, graph=False),
    Row(
        "mla_append",
        "triton",
        mla_append.TritonMlaAppend,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        requires=TRITON,
    ),
    Row("mla_append", "torch", mla_append.TorchMlaAppend, graph=False),
)

GROUPED_ROUTING_ROWS = (
    Row(
        "grouped_routing",
        "triton",
        grouped_routing.TritonGroupedRouting,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        requires=TRITON,
    ),
    Row(
        "grouped_routing",
        "flashinfer",
        grouped_routing.FlashInferGroupedRouting,
        architectures=CUTLASS_MOE - {"sm_110"},
        elsewhere="FlashInfer compiles its fused routing for sm_89, sm_90, sm_100, sm_103, sm_120 and sm_121",
        limit=_fused_topk,
        requires=FLASHINFER,
    ),
    Row("grouped_routing", "torch", grouped_routing.TorchGroupedRouting),
)

INPUT_ROUTING_ROWS = (
    Row(
        "input_routing",
        "triton",
        input_routing.TritonInputRouting,
        architectures=GPUS - {"sm_75"},
        elsewhere=NO_TRITON,
        requires=TRITON,
    ),
    Row("input_routing", "torch", input_routing.TorchInputRouting),
)
