"""A step of decodes, compiled by torch.compile in one piece with FlashInfer's and the own kernels, equals the step run eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from inference_service.config import Kernels, load_config
from inference_service.execution.device import find_device
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import Setting
from inference_service.kernels.versions import installed_versions
from inference_service.models.config import MoeConfig
from tests.unit.test_compile import check_compiled, decode_layout, random_model, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PAGE_SIZE, CONTEXTS = 64, [5, 200, 64, 129]
FORCED = Kernels(attention_decode="xqa", moe="cutlass", gemm="tinygemm", norm="flashinfer", sampling="flashinfer")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
@pytest.mark.parametrize("kernels", [FORCED, Kernels()], ids=["flashinfer", "default"])
def test_a_compiled_decode_step_equals_the_eager_one(kernels: Kernels, family: str, backend: str) -> None:
    target = find_device(load_config(None, ["device.kind=cuda"]))
    choices = select(kernels, Setting(target.architecture, torch.bfloat16, 128, 8, PAGE_SIZE, installed_versions()))
    if kernels is FORCED:
        assert {choice.row.backend for choice in choices} >= {"xqa", "cutlass", "tinygemm", "flashinfer"}
    config = replace(tiny(family), vocab_size=1000, hidden_size=512, intermediate_size=768, heads=16, kv_heads=2, head_dim=128)
    config = replace(config, max_context=1024, moe=config.moe and MoeConfig(16, 4, 256, True, frozenset({1})))
    model = random_model(make_operators(choices), config, torch.bfloat16, target.device, std=0.03)

    def same(ours: Tensor, theirs: Tensor) -> None:
        assert ours.isfinite().all()
        assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 1e-2

    check_compiled(model, decode_layout(CONTEXTS, PAGE_SIZE, target.device), False, backend, same)
