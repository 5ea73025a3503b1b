"""Products on the GPU against float32 references, eager and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.flashinfer_elementwise import CublasGemm
from inference_service.kernels.gemm import TorchGemm
from inference_service.kernels.small_gemm import TritonGemm, TritonOrCublasGemm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS: dict[str, Callable[[], Any]] = {
    "torch": TorchGemm,
    "cublas": CublasGemm,
    "triton": TritonGemm,
    "triton+cublas": TritonOrCublasGemm,
}
SHAPES = {
    "router": (128, 2048),
    "qkv": (5120, 2048),
    "o": (2048, 4096),
    "lm_head": (151936, 2048),
    "smollm2": (576, 1536),
    "odd": (264, 72),
}


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 8, 17, 33, 70])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(backend: str, shape: str, tokens: int, biased: bool) -> None:
    outputs, inputs = SHAPES[shape]
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16) if biased else None
    gemm = BACKENDS[backend]()
    torch.full((tokens, outputs), float("nan"), device="cuda", dtype=torch.bfloat16)
    y = gemm(x, gemm.pack(weight), bias)
    assert (y.dtype, y.shape) == (x.dtype, (tokens, outputs))
    assert error(y, F.linear(x.float(), weight.float(), None if bias is None else bias.float())) < 1e-2


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("shape", ["router", "qkv", "o", "odd"])
def test_the_own_kernels_in_a_cuda_graph(shape: str, tokens: int) -> None:
    outputs, inputs = SHAPES[shape]
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    gemm = TritonGemm()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        gemm(x, weight, None)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = gemm(x, weight, None)
        for _ in range(3):
            x.normal_()
            y.fill_(float("nan"))
            graph.replay()
            assert error(y, x.float() @ weight.float().T) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_silu_and_mul(backend: str, tokens: int) -> None:
    gate_up = torch.randn(tokens, 2 * 768, device="cuda", dtype=torch.bfloat16)
    gate, up = gate_up.float().chunk(2, dim=-1)
    assert error(BACKENDS[backend]().silu_and_mul(gate_up.clone()), F.silu(gate) * up) < 1e-2
