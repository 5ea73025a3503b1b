"""The own kernels for weights in FP8, interpreted, against what rounds activations alike, and against the dequantized weights."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.fp8 import BLOCK, E4M3, LARGEST, BlockFp8, TorchFp8Gemm, TorchFp8Moe, blocks, quantize, saturated
from inference_service.kernels.routing import TorchRouting

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU"),
    pytest.mark.usefixtures("loop_bounds", "nearest_e4m3", "seeded"),
]


def sizes(*shape: int) -> Tensor:
    return torch.rand(shape).mul(4).exp()


def random_x(tokens: int, inputs: int) -> Tensor:
    """Blocks differ in size, so that no scale can stand for another."""
    return torch.randn(tokens, inputs) * sizes(tokens, blocks(inputs)).repeat_interleave(BLOCK, 1)[:, :inputs]


def random_fp8(*shape: int) -> BlockFp8:
    """A matrix, or one an expert; so do its blocks."""
    if len(shape) == 2:
        outputs, inputs = shape
        scales = sizes(blocks(outputs), blocks(inputs)).repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK, 1)[:, :inputs]
        return quantize(torch.randn(shape) * scales)
    matrices = [random_fp8(*shape[1:]) for _ in range(shape[0])]
    values = torch.stack([matrix.values.view(torch.uint8) for matrix in matrices]).view(E4M3)
    return BlockFp8(values, torch.stack([matrix.scales for matrix in matrices]))


def rounded(x: Tensor) -> Tensor:
    """Each 128 values rounded to E4M3 with a scale of their own."""
    blocked = x.float().view(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    scales = blocked.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST
    return (saturated(blocked / scales).float() * scales).view(x.shape)


def rounding_experts(x: Tensor, gate_up: BlockFp8, down: BlockFp8, ids: Tensor, weights: Tensor, up_first: bool) -> Tensor:
    """The experts where activations are rounded before each product."""
    gate_up_E2IC, down_ECI = (matrix.dequantize(torch.float32) for matrix in (gate_up, down))
    y = torch.zeros_like(x)
    for token, k in itertools.product(range(len(x)), range(ids.shape[1])):
        halves = (gate_up_E2IC[ids[token, k]] @ rounded(x[token])).chunk(2)
        gate, up = reversed(halves) if up_first else halves
        y[token] += down_ECI[ids[token, k]] @ rounded(F.silu(gate) * up) * weights[token, k]
    return y


def product(x: Tensor, matrix: BlockFp8, **options: int) -> Tensor:
    kernels = pytest.importorskip("inference_service.kernels.triton_split_gemm")
    y: Tensor = kernels.gemm_fp8_split(x, matrix.values, matrix.scales, **options)
    return y


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [1, 5, 16, 33, 100])
def test_each_number_of_tokens(tokens: int) -> None:
    x, matrix = random_x(tokens, 640), random_fp8(192, 640)
    expected = F.linear(rounded(x), matrix.dequantize(torch.float32))
    assert error(product(x, matrix), expected) < 1e-5


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("outputs", [192, 256])
def test_splits(splits: int, outputs: int) -> None:
    """Even and uneven ones, of tiles of 64 rows and of 128."""
    x, matrix = random_x(3, 896), random_fp8(outputs, 896)
    expected = F.linear(rounded(x), matrix.dequantize(torch.float32))
    assert error(product(x, matrix, most_splits=splits), expected) < 1e-5


def test_bfloat16() -> None:
    x, matrix = random_x(7, 1408), random_fp8(64, 1408)
    y = product(x.bfloat16(), matrix)
    assert y.dtype == torch.bfloat16
    assert error(y, F.linear(rounded(x.bfloat16()), matrix.dequantize(torch.float32))) < 1e-2


def test_a_token_of_zeros() -> None:
    x, matrix = random_x(3, 256), random_fp8(64, 256)
    x[0], x[1, :BLOCK] = 0, 0
    y = product(x, matrix)
    assert (y[0] == 0).all() and error(y[1:], F.linear(rounded(x[1:]), matrix.dequantize(torch.float32))) < 1e-5


def test_no_tokens() -> None:
    x, matrix = random_x(1, 256), random_fp8(64, 256)
    assert product(x[:0], matrix).shape == (0, 64)


@pytest.mark.parametrize(("blocks", "splits", "found"), [(16, 4, 4), (16, 16, 2), (1, 8, 1), (11, 4, 3), (5, 9, 2)])
def test_how_blocks_are_split(blocks: int, splits: int, found: int) -> None:
    kernels = pytest.importorskip("inference_service.kernels.triton_split_gemm")
    assert kernels.blocks_of_split(blocks, splits) == found


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), [(1, 192, 2048), (2, 160, 384), (2, 16, 128), (1, 32, 1408)])
def test_own_product(tokens: int, outputs: int, inputs: int) -> None:
    triton_fp8 = pytest.importorskip("inference_service.kernels.triton_fp8")
    x, matrix = random_x(tokens, inputs), random_fp8(outputs, inputs)
    assert error(triton_fp8.gemv_fp8(x, matrix.values, matrix.scales), TorchFp8Gemm()(x, matrix)) < 1e-6
    y = triton_fp8.gemv_fp8(x.bfloat16(), matrix.values, matrix.scales)
    assert y.dtype == torch.bfloat16 and error(y, F.linear(x, matrix.dequantize(torch.float32))) < 1e-2


@pytest.mark.parametrize(("tokens", "hidden", "experts", "size", "top_k"), [(1, 128, 4, 128, 2), (1, 72, 3, 256, 2), (2, 256, 3, 256, 2)])
@pytest.mark.parametrize("up_first", [False, True])
def test_own_experts(tokens: int, hidden: int, experts: int, size: int, top_k: int, up_first: bool) -> None:
    triton_fp8 = pytest.importorskip("inference_service.kernels.triton_fp8")
    triton_grouped = pytest.importorskip("inference_service.kernels.triton_grouped")
    gate_up, down = random_fp8(experts, 2 * size, hidden), random_fp8(experts, hidden, size)
    x = random_x(tokens, hidden)
    ids, weights = TorchRouting()(torch.randn(tokens, experts), top_k, True)
    expected = TorchFp8Moe()(x, gate_up, down, ids, weights)
    if up_first:
        half = blocks(size)
        gate_up = BlockFp8(
            gate_up.values.view(torch.uint8).roll(size, 1).view(E4M3),
            torch.cat((gate_up.scales[:, half:], gate_up.scales[:, :half]), dim=1),
        )
    arguments = gate_up.values, gate_up.scales.contiguous(), down.values, down.scales, ids, weights, up_first
    assert error(triton_fp8.moe_gemv_fp8(x, *arguments), expected) < 1e-5
    if hidden % BLOCK == 0:
        expected = rounding_experts(x, gate_up, down, ids, weights, up_first)
        assert error(triton_grouped.moe_grouped_fp8(x, *arguments), expected) < 1e-5
        triton_tiled = pytest.importorskip("inference_service.kernels.triton_tiled")
        assert error(triton_tiled.moe_tiled_fp8(x, *arguments), expected) < 1e-5


@pytest.mark.parametrize(("name", "tokens"), [("grouped", 23), ("tiled", 85)])
def test_own_experts_whose_tokens_are_many(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of one expert's than a block or a tile holds, none of another's, and more than a launch takes."""
    kernels = pytest.importorskip(f"inference_service.kernels.triton_{name}")
    gate_up, down, x = random_fp8(3, 256, 256), random_fp8(3, 256, 128), torch.randn(tokens, 256)
    ids = torch.tensor([[0, 2]] * 20 + [[2, 0]] * (tokens - 20), dtype=torch.int32)
    weights = torch.rand(tokens, 2)
    arguments = gate_up.values, gate_up.scales, down.values, down.scales, ids, weights, False
    expected = rounding_experts(x, gate_up, down, ids, weights, up_first=False)
    for pairs in (kernels.MOST_PAIRS, 32):
        monkeypatch.setattr(kernels, "MOST_PAIRS", pairs)
        assert error(getattr(kernels, f"moe_{name}_fp8")(x, *arguments), expected) < 1e-5
