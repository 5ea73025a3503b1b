"""The own kernels that stream a weight once for some dozens of tokens, or take them in tiles, interpreted, against the references; in
float16, since Triton's interpreter multiplies bfloat16 by its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.moe import TorchMoe
from inference_service.kernels.routing import TorchRouting

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU"),
    pytest.mark.usefixtures("loop_bounds", "seeded"),
]


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


def experts_of(count: int, size: int, hidden: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2 * size, hidden), torch.randn(count, hidden, size)


def experts_by(name: str) -> Any:
    kernels = pytest.importorskip(f"inference_service.kernels.triton_{name}")
    return getattr(kernels, f"moe_{name}")


def swapped(gate_up: Tensor) -> Tensor:
    return gate_up.roll(gate_up.shape[1] // 2, 1)


@pytest.mark.parametrize(
    ("name", "tokens", "hidden", "experts", "size", "top_k"),
    [
        ("grouped", 1, 128, 4, 128, 2),
        ("grouped", 3, 256, 5, 384, 3),
        ("grouped", 19, 128, 2, 128, 2),
        ("tiled", 1, 128, 4, 128, 2),
        ("tiled", 300, 256, 2, 128, 2),
        ("tiled", 150, 128, 5, 384, 3),
    ],
)
@pytest.mark.parametrize("up_first", [False, True])
def test_experts(name: str, tokens: int, hidden: int, experts: int, size: int, top_k: int, up_first: bool) -> None:
    """Some have no token, and some more than a block or a tile of them; the last tile is a half or a quarter, or a whole one."""
    moe = experts_by(name)
    gate_up, down = experts_of(experts, size, hidden)
    x = torch.randn(tokens, hidden)
    ids, weights = TorchRouting()(torch.randn(tokens, experts), top_k, True)
    expected = TorchMoe()(x, gate_up, down, ids, weights)
    stacked = swapped(gate_up) if up_first else gate_up
    assert error(moe(x, stacked, down, ids, weights, up_first), expected) < 1e-5
    halves = (tensor.half() for tensor in (x, stacked, down))
    y = moe(*halves, ids, weights, up_first)
    assert y.dtype == torch.float16 and error(y, expected) < 1e-2


@pytest.mark.parametrize("name", ["grouped", "tiled"])
def test_experts_of_more_tokens_than_a_launch_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = pytest.importorskip(f"inference_service.kernels.triton_{name}")
    gate_up, down, x = *experts_of(3, 128, 128), torch.randn(23, 128)
    ids, weights = torch.tensor([[0, 2]] * 20 + [[2, 0]] * 3, dtype=torch.int32), torch.rand(23, 2)
    for parts in ("FEW", "MANY"):
        monkeypatch.setattr(f"inference_service.kernels.triton_expert_lists.{parts}", (8, 4))
    monkeypatch.setattr(kernels, "MOST_PAIRS", 32)
    assert error(experts_by(name)(x, gate_up, down, ids, weights, False), TorchMoe()(x, gate_up, down, ids, weights)) < 1e-5


@pytest.mark.parametrize("counts", [[0, 0, 300], [300, 0, 0], [128, 0, 129], [1, 127, 64], [65, 32, 33], [5, 0, 0]])
def test_tiles_of_uneven_experts(counts: list[int]) -> None:
    """Each pair is computed once, wherever an expert's tiles end, and tables have room for all tiles."""
    gate_up, down = experts_of(3, 128, 128)
    ids = torch.cat([torch.full((count,), expert) for expert, count in enumerate(counts)]).int()
    ids = ids[torch.randperm(len(ids))][:, None].contiguous()
    x, weights = torch.randn(len(ids), 128), torch.rand(len(ids), 1)
    assert error(experts_by("tiled")(x, gate_up, down, ids, weights, False), TorchMoe()(x, gate_up, down, ids, weights)) < 1e-5


def test_ids_of_no_expert_take_no_tile() -> None:
    """Whatever routes them so, the others are computed."""
    gate_up, down = experts_of(3, 128, 128)
    ids, x, weights = torch.randint(-1, 4, (300, 1), dtype=torch.int32), torch.randn(300, 128), torch.rand(300, 1)
    known = ((ids >= 0) & (ids < 3)).squeeze(1)
    expected = TorchMoe()(x[known], gate_up, down, ids[known], weights[known])
    assert error(experts_by("tiled")(x, gate_up, down, ids, weights, False)[known], expected) < 1e-5


class Recorded:
    """A kernel, and with how many tokens it was called."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.tokens = kernel, list[int]()

    def __call__(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.tokens.append(len(x))
        y: Tensor = self.kernel(x, *rest, **named)
        return y


@pytest.mark.parametrize(
    ("hidden", "dtype", "once_a_token", "once", "tiled"),
    [(128, torch.float16, [1], [2, 12], [13]), (96, torch.float16, [1, 2], [], []), (128, torch.float32, [1, 2], [], [])],
)
def test_which_kernels_experts_take(hidden: int, dtype: torch.dtype, once_a_token: list[int], once: list[int], tiled: list[int]) -> None:
    """With two tokens there are more pairs than a third of the experts, with 13 more than 4 an expert; other shapes and float32 are for the
    kernels that take all."""
    pytest.importorskip("triton")
    from inference_service.kernels.flashinfer_moe import TritonMoe

    moe = TritonMoe()
    moe._gemv, moe._grouped, moe._tiled = Recorded(moe._gemv), Recorded(moe._grouped), Recorded(moe._tiled)
    gate_up, down = experts_of(6, 128, hidden)
    for tokens in once_a_token + once + tiled:
        x = torch.randn(tokens, hidden)
        ids, weights = TorchRouting()(torch.randn(tokens, 6), 2, True)
        y = moe(x.to(dtype), *moe.pack(swapped(gate_up).to(dtype), down.to(dtype)), ids, weights)
        assert error(y, TorchMoe()(x, gate_up, down, ids, weights)) < 1e-2
    assert (moe._gemv.tokens, moe._grouped.tokens, moe._tiled.tokens) == (once_a_token, once, tiled)


@pytest.mark.parametrize(("experts", "size", "top_k", "most"), [(128, 768, 8, 64), (64, 1408, 6, 42), (8, 256, 2, 16), (128, 192, 8, 8)])
def test_for_how_many_tokens_the_own_kernels_are(experts: int, size: int, top_k: int, most: int) -> None:
    pytest.importorskip("triton")
    from inference_service.kernels.flashinfer_moe import CutlassMoe, TritonMoe, TritonOrCutlassMoe

    moe = TritonOrCutlassMoe.__new__(TritonOrCutlassMoe)  # what is chosen from needs FlashInfer
    moe._few, moe._many = TritonMoe(), CutlassMoe.__new__(CutlassMoe)
    down = torch.empty(experts, 128, size, dtype=torch.bfloat16)
    for tokens in (1, most, most + 1):
        chosen = moe.choose(torch.zeros(tokens, top_k, dtype=torch.int32), down)
        assert chosen is (moe._few if tokens <= most else moe._many)


@pytest.mark.parametrize("tokens", [1, 16, 33, 100])
@pytest.mark.parametrize("biased", [False, True])
def test_products(tokens: int, biased: bool) -> None:
    kernels = pytest.importorskip("inference_service.kernels.triton_split_gemm")
    x, weight, bias = torch.randn(tokens, 640), torch.randn(192, 640), torch.randn(192) if biased else None
    expected = F.linear(x, weight, bias)
    assert error(kernels.gemm_split(x, weight, bias), expected) < 1e-5
    y = kernels.gemm_split(x.half(), weight.half(), None if bias is None else bias.half())
    assert y.dtype == torch.float16 and error(y, expected) < 1e-2


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7])
def test_splits(splits: int) -> None:
    """Even and uneven ones; the bias is added once."""
    kernels = pytest.importorskip("inference_service.kernels.triton_split_gemm")
    x, weight, bias = torch.randn(3, 704), torch.randn(64, 704), torch.randn(64) * 30
    assert error(kernels.gemm_split(x, weight, bias, most_splits=splits), F.linear(x, weight, bias)) < 1e-5


@pytest.mark.parametrize("name", ["grouped", "tiled"])
def test_experts_of_no_tokens(name: str) -> None:
    ids = torch.empty(0, 2, dtype=torch.int32)
    assert experts_by(name)(torch.randn(0, 128), *experts_of(3, 128, 128), ids, torch.rand(0, 2), False).shape == (0, 128)


def test_no_tokens() -> None:
    kernels = pytest.importorskip("inference_service.kernels.triton_split_gemm")
    assert kernels.gemm_split(torch.randn(0, 128), torch.randn(64, 128), None).shape == (0, 64)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "dtype", "chosen", "chosen_or_cublas"),
    [
        (1, 5120, 2048, torch.bfloat16, "gemv", "gemv"),
        (2, 5120, 2048, torch.bfloat16, "split", ""),
        (8, 128, 2048, torch.bfloat16, "gemv", "gemv"),
        (9, 128, 2048, torch.bfloat16, "split", "split"),
        (64, 2048, 4096, torch.bfloat16, "split", "split"),
        (65, 2048, 4096, torch.bfloat16, "split", ""),
        (16, 4096, 4096, torch.float16, "split", "split"),
        (17, 4096, 4096, torch.float16, "split", ""),
        (2, 2048, 4096, torch.float32, "", ""),
        (8, 60, 2048, torch.bfloat16, "gemv", "gemv"),
        (9, 60, 2048, torch.bfloat16, "", ""),
        (2, 2048, 96, torch.bfloat16, "", ""),
    ],
)
def test_which_kernel_a_product_takes(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, chosen: str, chosen_or_cublas: str
) -> None:
    from inference_service.kernels.small_gemm import TritonGemm, TritonOrCublasGemm

    x, weight = torch.empty(tokens, inputs, dtype=dtype), torch.empty(outputs, inputs, dtype=dtype)
    for kind, expected in ((TritonGemm, chosen), (TritonOrCublasGemm, chosen_or_cublas)):
        gemm = kind.__new__(kind)  # what is chosen from needs FlashInfer
        assert gemm.choose(x, weight) == expected
