"""What Triton makes of the own products, compiled here for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from inference_service.kernels import triton_split_gemm as split_gemm, triton_tiled as tiled
from inference_service.kernels.triton_grouped import FP8_STAGES, ROWS, STAGES, TOKENS, _down, _gate_up
from inference_service.kernels.triton_split_gemm import WIDTHS, _gemm_split

ROUNDED = set("x_TC x_TK h_AI gate_up_E2IC down_ECI weight_NK x weight".split())
TYPES = {"x_TK": "*bf16", "y_A": "*bf16", "pairs_EA": "*i32", "counts_E": "*i32", "tiles_N2": "*i32", "pairs": "i32", "tokens": "i32"}

def build(launched, architecture, warps, stages, FP8, **sizes):
    kernel = launched.jit
    sizes |= {"PDL": architecture >= 90, "FP8": FP8}
    absent = [] if launched is not _gemm_split else ["bias_N"]
    absent += [] if FP8 else [name for name in kernel.arg_names if "scales" in name]
    sizes |= dict.fromkeys(absent)
    rounded = dict.fromkeys(ROUNDED - {"x_TK"}, "*fp8e4nv") | {"h_AI": "*fp8e4nv" if launched is _down else "*bf16"}
    types = TYPES | (rounded if FP8 else dict.fromkeys(ROUNDED, "*bf16"))
    types = {name: types.get(name, "*fp32") for name in kernel.arg_names if name not in sizes}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name, type in types.items() if type[0] == "*"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"num_warps": warps, "num_stages": stages})

def variants(architecture, FP8):
    split = {"N": 2048, "K": 2048, "FP8": FP8, "BLOCKS": 8, "BLOCK": 128 if FP8 else 64}
    for tokens in WIDTHS:
        for rows in (64, 128) if FP8 else (64,):
            stages = split_gemm.FP8_STAGES[tokens] if FP8 else split_gemm.STAGES
            yield build(_gemm_split, architecture, 4, stages, TOKENS=tokens, ROWS=rows, **split)
    sizes, stages = {"C": 2048, "I": 768, "FP8": FP8, "TOKENS": TOKENS, "ROWS": ROWS}, FP8_STAGES if FP8 else STAGES
    yield build(_gate_up, architecture, 4, stages[0], K=8, UP_FIRST=True, **sizes)
    yield build(_down, architecture, 4, stages[1], **sizes)
    tile, block, stages = (tiled.FP8_TOKENS, tiled.FP8_BLOCK, tiled.FP8_STAGES) if FP8 else (tiled.TOKENS, tiled.BLOCK, tiled.STAGES)
    sizes = {"UP_FIRST": True, "FP8": FP8, "ROWS": tiled.ROWS, "TOKENS": tile, "BLOCK": block}
    yield build(tiled._multiply, architecture, 4, stages[0], OUTPUTS=768, LENGTH=2048, SHARED=8, GATED=True, **sizes)
    yield build(tiled._multiply, architecture, 4, stages[1], OUTPUTS=2048, LENGTH=768, SHARED=1, GATED=False, **sizes)

for FP8 in (False, True):
    for architecture in (89, 120):
        for kernel in variants(architecture, FP8):
            assert kernel.metadata.shared <= 99 * 1024, (architecture, kernel.metadata)
    for kernel in variants(90, FP8):
        ptx = kernel.asm["ptx"]
        assert "wgmma.mma_async.sync.aligned.m64n" in ptx and "mma.sync" not in ptx
        assert (".f32.e4m3.e4m3" if FP8 else ".f32.bf16.bf16") in ptx
        assert "cp.async.cg.shared.global" in ptx
        before, after = ptx.split("griddepcontrol.wait", 1)
        assert "cp.async.cg" not in before and "st.global" in after
"""


def test_what_is_compiled() -> None:
    """On Hopper, tensor cores take the weight as it lies: copied to shared memory by no register, converted nowhere. Elsewhere it fits."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
