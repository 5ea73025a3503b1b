"""Dense matrix products, and the gated activation between two of them.

Shapes: T tokens, K inputs, N outputs, I intermediate size.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Gemm(Protocol):
    """y = x W^T + b."""

    def pack(self, weight_NK: Tensor) -> Tensor:
        """Lay a loaded weight out as this backend reads it. Called once a weight; the result is opaque, and may be the weight itself."""
        ...

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        """The product y_TN, of x's dtype."""
        ...

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """silu(gate) * up, where gate is the first half of the last dimension. Here, so that a backend can fuse it into a product."""
        ...

    def gelu_tanh_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """The same with gelu, in its tanh form."""
        ...


class TorchGemm:
    """PyTorch's own linear."""

    def pack(self, weight_NK: Tensor) -> Tensor:
        return weight_NK

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        return F.linear(x_TK, packed, bias_N)

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI).mul_(up_TI)

    def gelu_tanh_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.gelu(gate_TI, approximate="tanh").mul_(up_TI)


class OneDnnGemm(TorchGemm):
    """oneDNN with weights reordered into its blocked layout, once.

    PyTorch's linear calls MKL with plain weights, which for one to some dozens of tokens reaches half of the speed or less.
    """

    def pack(self, weight_NK: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK)
        return packed

    def __call__(self, x_TK: Tensor, packed: Tensor, bias_N: Tensor | None) -> Tensor:
        y_TN: Tensor = torch.ops.mkldnn._linear_pointwise(x_TK, packed, bias_N, "none", [], "")
        return y_TN


CUTE_DSL_TOKENS = 32
"""How many tokens the CuTe DSL's kernels take."""


def fits_cute_dsl(x_TK: Tensor, weight_NK: Tensor) -> bool:
    """Whether the kernels take a product. For the operator itself to ask, since what is traced has no addresses."""
    tokens, inputs = x_TK.shape
    laid_out = all(tensor.is_contiguous() and tensor.data_ptr() % 32 == 0 for tensor in (x_TK, weight_NK))
    return laid_out and 0 < tokens <= CUTE_DSL_TOKENS and inputs % 128 == 0
