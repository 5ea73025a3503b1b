"""Launches by `Launched` compute what Triton's own do, for each kind of argument that Triton compiles for."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():  # Triton decides when it is imported whether it compiles or interprets.
    pytest.skip("needs a GPU", allow_module_level=True)

import triton
import triton.language as tl

from inference_service.kernels.triton_launch import Launched


@Launched
@triton.jit
def _scale(x, y, bias, size, stride, factor, BLOCK: tl.constexpr, BIASED: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place * stride, mask=place < size, other=0.0) * factor
    if BIASED:
        value += tl.load(bias + place, mask=place < size, other=0.0)
    tl.store(y + place, value, mask=place < size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_kinds_of_arguments(dtype: torch.dtype, biased: bool) -> None:
    """Aligned and not, sizes and strides of 1, of multiples of 16 and of neither; each twice, of which the second is found."""
    memory = torch.randn(20000, device="cuda").to(dtype)
    for start in (0, 1, 8):
        for size in (1, 1024, 1040, 1041):
            for stride in (1, 2, 16):
                x, bias = memory[start : start + size * stride], memory[2048 + start : 2048 + start + size]
                expected = x[::stride].float() * 0.5 + (bias.float() if biased else 0.0)
                known = []
                for _ in range(2):
                    y = torch.full((size,), float("nan"), device="cuda", dtype=dtype)
                    _scale[(triton.cdiv(size, 1024),)](x, y, bias if biased else None, size, stride, 0.5, BLOCK=1024, BIASED=biased)
                    torch.testing.assert_close(y, expected.to(dtype))
                    known.append(len(_scale._compiled))
                assert known[0] == known[1]


def test_what_is_compiled_is_found_again() -> None:
    x, y = torch.ones(64, device="cuda"), torch.empty(64, device="cuda")
    before = len(_scale._compiled)
    for size in (33, 35, 41):  # one kind
        _scale[(4,)](x, y, None, size, 1, 2.0, BLOCK=32, BIASED=False)
    _scale[(4,)](x, y, None, 48, 1, 2.0, BLOCK=32, BIASED=False)  # a multiple of 16
    _scale[(4,)](x[1:], y, None, 33, 1, 2.0, BLOCK=32, BIASED=False)  # an address that is none
    assert len(_scale._compiled) - before == 3
    with pytest.raises(ValueError, match="cpu tensor"):
        _scale[(4,)](x.cpu(), y, None, 33, 1, 2.0, BLOCK=32, BIASED=False)
