"""Routing and experts on the GPU against float32 references, eager and in CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels import flashinfer_moe
from inference_service.kernels.expert_tactics import CYCLES_A_S, expert_tactics, microseconds
from inference_service.kernels.routing import TorchRouting, TritonRouting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS: dict[str, Callable[[], Any]] = {
    "cutlass": flashinfer_moe.CutlassMoe,
    "triton": flashinfer_moe.TritonMoe,
    "triton+cutlass": flashinfer_moe.TritonOrCutlassMoe,
}
SHAPES = {
    "qwen3-30b-a3b": (128, 768, 2048, 8),
    "qwen1.5-moe": (60, 1408, 2048, 4),
    "moonlight-16b-a3b": (64, 1408, 2048, 6),
    "tiny": (16, 256, 512, 4),
}


@cache
def weights(shape: str) -> tuple[Tensor, Tensor]:
    """[up, gate] of each expert, and down."""
    experts, size, hidden, _ = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(0)
    up_gate = torch.empty(experts, 2 * size, hidden, device="cuda", dtype=torch.bfloat16).normal_(0, 0.05, generator=generator)
    return up_gate, torch.empty(experts, hidden, size, device="cuda", dtype=torch.bfloat16).normal_(0, 0.05, generator=generator)


def inputs(shape: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    experts, _, hidden, top_k = SHAPES[shape]
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    return x, *TritonRouting()(torch.randn(tokens, experts, device="cuda"), top_k, True)


def reference(shape: str, x: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
    """Expert by expert, in float32."""
    up_gate, down = weights(shape)
    y = torch.zeros(x.shape, device="cuda")
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        up, gate = (x[tokens].float() @ up_gate[expert].float().T).chunk(2, dim=-1)
        y.index_add_(0, tokens, (F.silu(gate) * up) @ down[expert].float().T * scales[tokens, slots].unsqueeze(1))
    return y


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def poison(like: Tensor) -> None:
    """Leave NaN where the next allocations are likely to be."""
    for count in (1, 2, 4, 8):
        torch.full((count, *like.shape), float("nan"), dtype=like.dtype, device=like.device)


@pytest.mark.parametrize(("experts", "top_k"), [(128, 8), (60, 4), (256, 16), (64, 6)])
@pytest.mark.parametrize("tokens", [1, 7, 256, 4099])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(experts: int, top_k: int, tokens: int, renormalize: bool) -> None:
    logits = torch.randn(tokens, experts, device="cuda") * 3
    ids, scales = TritonRouting()(logits, top_k, renormalize)
    expected_ids, expected = TorchRouting()(logits, top_k, renormalize)
    assert (ids.dtype, scales.dtype) == (torch.int32, torch.float32)
    assert torch.equal(ids.sort().values, expected_ids.sort().values)
    torch.testing.assert_close(scales, expected, rtol=1e-5, atol=1e-7)


def test_routing_of_bfloat16_with_ties() -> None:
    logits = torch.randn(512, 128, device="cuda").to(torch.bfloat16)
    ids, scales = TritonRouting()(logits, 8, False)
    _, expected = TorchRouting()(logits, 8, False)
    torch.testing.assert_close(scales, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(logits.float().softmax(-1).gather(1, ids.long()), scales, rtol=1e-5, atol=1e-7)
    assert all(len(set(row)) == 8 for row in ids.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 16, 33, 128, 129, 256, 1111, 2500])
def test_experts(backend: str, shape: str, tokens: int) -> None:
    moe = BACKENDS[backend]()
    x, ids, scales = inputs(shape, tokens)
    poison(x)
    y = moe(x, *moe.pack(*weights(shape)), ids, scales)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    assert error(y, reference(shape, x, ids, scales)) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [16, 700])
def test_tokens_that_share_all_experts(backend: str, tokens: int) -> None:
    moe = BACKENDS[backend]()
    x, ids, scales = inputs("qwen3-30b-a3b", tokens)
    ids = ids[:1].repeat(tokens, 1)
    assert error(moe(x, *weights("qwen3-30b-a3b"), ids, scales), reference("qwen3-30b-a3b", x, ids, scales)) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 4, 8, 32, 128, 256])
def test_in_a_cuda_graph(backend: str, tokens: int) -> None:
    """Routing and experts are captured together, then replayed on other inputs."""
    moe, routing = BACKENDS[backend](), TritonRouting()
    shape = "qwen3-30b-a3b"
    experts, _, hidden, top_k = SHAPES[shape]
    x, logits = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16), torch.randn(tokens, experts, device="cuda")

    def step() -> Tensor:
        y: Tensor = moe(x, *weights(shape), *routing(logits, top_k, True))
        return y

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = step()
        for _ in range(3):
            x.normal_()
            logits.normal_()
            y.fill_(float("nan"))
            graph.replay()
            assert error(y, reference(shape, x, *TorchRouting()(logits, top_k, True))) < 1e-2


def test_tuned_kernels_are_right() -> None:
    shape = "qwen3-30b-a3b"
    experts, _, _, top_k = SHAPES[shape]
    moe, tactics = flashinfer_moe.CutlassMoe(), expert_tactics()
    tuned = tactics.tune(lambda x, ids, scales: moe(x, *weights(shape), ids, scales), weights(shape)[1][0, :, 0], experts, top_k, 16)
    assert list(tuned) == [16] and all(len(valid) > 1 for valid in tactics.valid.values())
    tactics.use(tuned)
    try:
        for tokens in (12, 16, 300):
            x, ids, scales = inputs(shape, tokens)
            poison(x)
            assert error(moe(x, *weights(shape), ids, scales), reference(shape, x, ids, scales)) < 1e-2
    finally:
        tactics.use({})


def test_the_own_kernels_give_equal_bits() -> None:
    moe = flashinfer_moe.TritonMoe()
    x, ids, scales = inputs("qwen3-30b-a3b", 4)
    packed = weights("qwen3-30b-a3b")
    first = moe(x, *packed, ids, scales)
    assert all(torch.equal(first, moe(x, *packed, ids, scales)) for _ in range(5))
    alone = moe(x[2:3].clone(), *packed, ids[2:3].clone(), scales[2:3].clone())
    assert torch.equal(first[2:3], alone)
    for tokens in (32, 700):
        x, ids, scales = inputs("qwen3-30b-a3b", tokens)
        first = moe(x, *packed, ids, scales)
        assert all(torch.equal(first, moe(x, *packed, ids, scales)) for _ in range(5))


def test_the_device_waits_for_a_slow_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all is launched, however long that takes."""
    x, asked, sleep = torch.zeros(1, device="cuda"), list[int](), torch.cuda._sleep

    def wait(cycles: int) -> None:
        asked.append(cycles)
        sleep(cycles)  # type: ignore[no-untyped-call]

    def run() -> None:
        time.sleep(0.001)
        x.add_(1)

    monkeypatch.setattr(torch.cuda, "_sleep", wait)
    assert microseconds(run, 10) > 0
    assert asked[-1] > asked[0] and asked[-1] > 0.01 * CYCLES_A_S
