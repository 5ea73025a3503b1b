"""torch.compile traces a step of decodes as one graph, kernels included, and what it then computes is what eager code computes.

Here with plain PyTorch and with the own kernels, interpreted; tests/gpu/test_compile.py has the same with all kernels on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inference_service.kernels.attention import SplitAttention, StepLayout
from inference_service.kernels.attention_mixed import TorchPagedAttention, TritonDecode, TritonPagedAttention
from inference_service.kernels.attention_torch import TorchDecode, TorchPrefill
from inference_service.kernels.flashinfer_moe import TritonMoe
from inference_service.kernels.gemm import TorchGemm
from inference_service.kernels.kv_append import TorchKvAppend, TritonKvAppend
from inference_service.kernels.moe import TorchMoe
from inference_service.kernels.norm import TorchNorm
from inference_service.kernels.routing import TorchRouting, TritonRouting
from inference_service.kernels.sampling import TorchSampling, TritonSampling
from inference_service.kernels.selection import Operators
from inference_service.models.build import Build
from inference_service.models.config import ModelConfig, MoeConfig
from inference_service.models.decoder import Decoder
from inference_service.models.families import make_model
from inference_service.models.rotary import RopeConfig

PAGE_SIZE, CONTEXTS = 16, [7, 33, 20]


def torch_operators() -> Operators:
    return Operators(
        attention=SplitAttention(TorchDecode(), TorchPrefill()),
        attention_mixed=TorchPagedAttention(),
        kv_append=TorchKvAppend(),
        routing=TorchRouting(),
        moe=TorchMoe(),
        gemm=TorchGemm(),
        norm=TorchNorm(),
        sampling=TorchSampling(),
    )


def own_operators() -> Operators:
    return Operators(
        attention=SplitAttention(TritonDecode(), TorchPrefill()),
        attention_mixed=TritonPagedAttention(),
        kv_append=TritonKvAppend(),
        routing=TritonRouting(),
        moe=TritonMoe(),
        gemm=TorchGemm(),
        norm=TorchNorm(),
        sampling=TritonSampling(),
    )


def tiny(family: str) -> ModelConfig:
    """Two layers whose heads the own kernels take; of Qwen3-MoE, one is dense."""
    sparse = family == "Qwen3MoeForCausalLM"
    return ModelConfig(
        architecture=family,
        dtype=torch.float32,
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=64,
        max_context=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10_000.0),
        tied_embeddings=False,
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=sparse,
        moe=MoeConfig(8, 2, 32, True, frozenset({1})) if sparse else None,
    )


def random_model(operators: Operators, config: ModelConfig, dtype: torch.dtype, device: torch.device, std: float = 0.1) -> Decoder:
    """Weights of `std`, and norms near 1."""
    model = make_model(Build(operators, dtype, device), config)
    generator = torch.Generator(device).manual_seed(0)
    for name, weight in model.weights().items():
        norm = name.endswith("norm.weight")
        weight.normal_(1.0 if norm else 0.0, std, generator=generator)
    model.pack()
    return model


def decode_layout(contexts: list[int], page_size: int, device: torch.device) -> StepLayout:
    rows, width = len(contexts), -(-max(contexts) // page_size)
    pages_RM = torch.randperm(rows * width, generator=torch.Generator().manual_seed(0)).view(rows, width)
    positions_T, row_T, contexts_R = torch.tensor([context - 1 for context in contexts]), torch.arange(rows), torch.tensor(contexts)
    positions_T, row_T, pages_RM, contexts_R = (each.to(device, torch.int32) for each in (positions_T, row_T, pages_RM, contexts_R))
    return StepLayout(rows, [1] * rows, contexts, positions_T, row_T, pages_RM, contexts_R)


def check_compiled(model: Decoder, layout: StepLayout, mixed: bool, backend: str, same: Callable[[Tensor, Tensor], None]) -> None:
    """A step with sampling, compiled in one piece, against the same step run eagerly: logits, cache, and ids by these logits."""
    device, rows = layout.positions_T.device, layout.decodes
    generator = torch.Generator(device).manual_seed(1)
    pages, page_size = layout.pages_RM.numel(), layout_page_size(layout)
    caches = [cache.normal_(generator=generator) for cache in model.new_cache(pages, page_size, device)]
    ids_T = torch.randint(0, model.config.vocab_size, (rows,), device=device, generator=generator)

    def step(caches: list[Tensor]) -> tuple[Tensor, Tensor]:
        logits_RV = model.forward(ids_T, layout, caches, None, mixed)
        return logits_RV, model.operators.sampling.greedy(logits_RV)

    torch.compiler.reset()
    compiled: Any = torch.compile(step, fullgraph=True, backend=backend)
    with torch.inference_mode():
        eager_caches = [cache.clone() for cache in caches]
        expected, _ = step(eager_caches)
        for _ in range(2):
            again = [cache.clone() for cache in caches]
            logits, ids = compiled(again)
            same(logits, expected)
            assert torch.equal(logits.gather(1, ids.unsqueeze(1)), logits.amax(1, keepdim=True))
            for ours, theirs in zip(again, eager_caches, strict=True):
                same(ours, theirs)


def layout_page_size(layout: StepLayout) -> int:
    """The page size for which the table is just wide enough."""
    return next(size for size in (16, 64) if -(-max(layout.contexts) // size) == layout.pages_RM.shape[1])


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("operators", [torch_operators, own_operators])
def test_a_decode_step_is_one_graph(operators: Callable[[], Operators], mixed: bool, request: pytest.FixtureRequest) -> None:
    if operators is own_operators:
        if torch.cuda.is_available():
            pytest.skip("tests/gpu runs these kernels on the GPU")
        request.getfixturevalue("loop_bounds")
    device = torch.device("cpu")
    model = random_model(operators(), tiny("Qwen3MoeForCausalLM"), torch.bfloat16, device)

    def same(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)

    check_compiled(model, decode_layout(CONTEXTS, PAGE_SIZE, device), mixed, "aot_eager", same)
