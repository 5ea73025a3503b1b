"""The own product of some dozens of tokens with a weight in FP8, interpreted, against one that rounds activations alike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_service.kernels.fp8 import BLOCK, BlockFp8, blocks, quantize
from tests.unit.test_fp8 import rounded

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs this kernel on the GPU"),
    pytest.mark.usefixtures("loop_bounds", "nearest_e4m3"),
]


def random(tokens: int, outputs: int, inputs: int) -> tuple[Tensor, BlockFp8]:
    """Blocks of activations and of the weight differ in size, so that no scale can stand for another."""
    generator = torch.Generator().manual_seed(0)

    def sizes(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).mul(4).exp()

    x = torch.randn(tokens, inputs, generator=generator) * sizes(tokens, inputs // BLOCK).repeat_interleave(BLOCK, 1)
    scales = sizes(blocks(outputs), inputs // BLOCK).repeat_interleave(BLOCK, 0)[:outputs].repeat_interleave(BLOCK, 1)
    return x, quantize(torch.randn(outputs, inputs, generator=generator) * scales)


def product(x: Tensor, matrix: BlockFp8, **options: int) -> Tensor:
    kernels = pytest.importorskip("inference_service.kernels.triton_fp8_gemm")
    y: Tensor = kernels.gemm_fp8_split(x, matrix.values, matrix.scales, **options)
    return y


def error(y: Tensor, expected: Tensor) -> float:
    return float((y.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [1, 5, 16, 33, 100])
def test_each_number_of_tokens(tokens: int) -> None:
    x, matrix = random(tokens, 192, 640)
    expected = F.linear(rounded(x), matrix.dequantize(torch.float32))
    assert error(product(x, matrix), expected) < 1e-5


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("outputs", [192, 256])
def test_splits(splits: int, outputs: int) -> None:
    """Even and uneven ones, of tiles of 64 rows and of 128."""
    x, matrix = random(3, outputs, 896)
    expected = F.linear(rounded(x), matrix.dequantize(torch.float32))
    assert error(product(x, matrix, most_splits=splits), expected) < 1e-5


def test_bfloat16() -> None:
    x, matrix = random(7, 64, 1408)
    y = product(x.bfloat16(), matrix)
    assert y.dtype == torch.bfloat16
    assert error(y, F.linear(rounded(x.bfloat16()), matrix.dequantize(torch.float32))) < 1e-2


def test_a_token_of_zeros() -> None:
    x, matrix = random(3, 64, 256)
    x[0], x[1, :BLOCK] = 0, 0
    y = product(x, matrix)
    assert (y[0] == 0).all() and error(y[1:], F.linear(rounded(x[1:]), matrix.dequantize(torch.float32))) < 1e-5


def test_no_tokens() -> None:
    x, matrix = random(1, 64, 256)
    assert product(x[:0], matrix).shape == (0, 64)


@pytest.mark.parametrize(("blocks", "splits", "found"), [(16, 4, 4), (16, 16, 2), (1, 8, 1), (11, 4, 3), (5, 9, 2)])
def test_how_blocks_are_split(blocks: int, splits: int, found: int) -> None:
    kernels = pytest.importorskip("inference_service.kernels.triton_fp8_gemm")
    assert kernels.blocks_of_split(blocks, splits) == found


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from inference_service.kernels.triton_fp8_gemm import _gemm_split

sizes = {"N": 5120, "K": 2048, "BLOCKS": 4, "TOKENS": 16, "ROWS": 128, "PDL": True}
types = {"x_TK": "*bf16", "weight_NK": "*fp8e4nv", "scales": "*fp32", "y_STN": "*fp32", "tokens": "i32"}
aligned = {(place,): [["tt.divisibility", 16]] for place in range(4)}
source = ASTSource(_gemm_split, types | dict.fromkeys(sizes, "constexpr"), constexprs=sizes, attrs=aligned)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 4, "launch_pdl": True}).asm["ptx"])
"""


def test_what_is_compiled_for_hopper() -> None:
    """Tensor cores take the weight as it lies: copied to shared memory by no register, and converted nowhere."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ptx = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3" in ptx and "mma.sync" not in ptx
    assert "cp.async.cg.shared.global" in ptx and "ld.global.v4" not in ptx
    before, after = ptx.split("griddepcontrol.wait", 1)
    assert "cp.async.cg" not in before and "st.global" in after
