"""The operators' schemas and fakes against what the kernels do on the GPU: mutation, shapes, dtypes and strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.kernels.attention import AttentionSpec
from inference_service.kernels.flashinfer_fa3 import Fa3Prefill, GatheredPlan, PagedFa3
from inference_service.kernels.flashinfer_mla import FlashInferLatent, FlashInferMlaPrefill
from inference_service.kernels.flashinfer_paged import Fa2Decode, Fa2Prefill, PagedAttention
from tests.gpu.test_attention import QWEN, make_cache, make_layout, make_query
from tests.unit.own_kernels import launches
from tests.unit.test_custom_ops import check, import_own

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def test_own_operators_do_what_they_declare() -> None:
    import_own()
    for name, arguments in launches(torch.device("cuda")):
        check(name, arguments)


def moe() -> tuple[Any, ...]:
    ids = torch.tensor([[0, 3], [2, 1], [3, 0]], dtype=torch.int32, device="cuda")
    return random(3, 512), random(4, 512, 512), random(4, 512, 256), ids, torch.rand(3, 2, device="cuda")


def xqa() -> tuple[Any, ...]:
    layout = make_layout(QWEN, [5, 200, 64], [])
    q, workspace = make_query(layout, QWEN), torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    pages = layout.pages_RM.contiguous()
    return q, make_cache(QWEN), pages, layout.contexts_R, pages.shape[1] * QWEN.page_size, 0.1, torch.empty_like(q), workspace


def fmha_v2() -> tuple[Any, ...]:
    layout = make_layout(QWEN, [], [(40, 40), (5, 300)])
    q, workspace = make_query(layout, QWEN), torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    starts_q, starts_kv = (torch.tensor(starts, dtype=torch.int32, device="cuda") for starts in ([0, 40, 45], [0, 40, 340]))
    return q, make_cache(QWEN), layout.pages_RM, layout.contexts_R, starts_q, starts_kv, 40, 300, 0.1, torch.empty_like(q), workspace


FLASHINFER: dict[str, Callable[[], tuple[Any, ...]]] = {
    "rms_norm": lambda: (random(5, 2048), random(2048), 1e-6, False),
    "add_rms_norm": lambda: (random(5, 2048), random(5, 2048), random(2048), 1e-6, True),
    "silu_and_mul": lambda: (random(5, 1536),),
    "gelu_tanh_and_mul": lambda: (random(5, 1536),),
    "tinygemm": lambda: (random(5, 512), random(64, 512), random(64)),
    "cutlass_moe": moe,
    "fused_topk_deepseek": lambda: (torch.randn(5, 256, device="cuda"), torch.randn(256, device="cuda"), 8, 4, 8, 2.5),
    "xqa": xqa,
    "fmha_v2": fmha_v2,
    "top_k_renorm": lambda: (torch.rand(3, 1000, device="cuda").softmax(-1), torch.tensor([1, 50, 999], device="cuda").int()),
    "top_p_renorm": lambda: (torch.rand(3, 1000, device="cuda").softmax(-1), torch.tensor([0.1, 0.5, 0.99], device="cuda")),
}


@pytest.mark.parametrize("name", FLASHINFER)
def test_flashinfer_s_operators_do_what_they_declare(name: str) -> None:
    from inference_service.kernels import flashinfer_ops

    assert hasattr(flashinfer_ops, name)
    check(name, FLASHINFER[name]())


@pytest.mark.parametrize("backend", [Fa2Decode, Fa2Prefill, PagedFa3])
def test_planned_attention_does_what_it_declares(backend: type[PagedAttention]) -> None:
    layout = make_layout(QWEN, [5, 200], []) if backend is Fa2Decode else make_layout(QWEN, [], [(40, 40), (5, 300)])
    q, kv, attention = make_query(layout, QWEN), make_cache(QWEN), backend()
    check("paged_attention", (q, kv, attention.plan(layout, kv, QWEN.heads), torch.empty_like(q)))


def test_planned_attention_to_gathered_contexts_does_what_it_declares() -> None:
    layout, kv = make_layout(QWEN, [], [(1040, 1040), (5, 300)]), make_cache(QWEN)
    q, plan = make_query(layout, QWEN), Fa3Prefill().plan(layout, kv, QWEN.heads)
    assert isinstance(plan, GatheredPlan)
    kv_2KHD = random(2, 1340, QWEN.kv_heads, QWEN.head_dim)
    check("gather_contexts", (kv, plan.pages_N, plan.starts_N, kv_2KHD))
    check("ragged_attention", (q, kv_2KHD[0], kv_2KHD[1], plan.wrapper, torch.empty_like(q)))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_planned_attention_to_latents_does_what_it_declares(backend: str) -> None:
    layout, kv = make_layout(QWEN, [], [(40, 40), (5, 300)]), random(256, 1, 1, QWEN.page_size, 576)
    absorbed = FlashInferLatent(backend, prefills=True).plan(layout, kv, 16, AttentionSpec(scale=0.1))
    check("mla_paged", (random(45, 16, 512), random(45, 16, 64), kv, absorbed, random(45, 16, 512)))
    expanded = FlashInferMlaPrefill(backend).plan(layout, kv, 16, AttentionSpec(scale=0.1))
    assert not isinstance(expanded, int)
    check("ragged_attention", (random(45, 16, 192), random(340, 16, 192), random(340, 16, 128), expanded.wrapper, random(45, 16, 128)))
