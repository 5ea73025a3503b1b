"""Launches each own Triton kernel once or twice on odd shapes, for NVIDIA's checkers of memory and races:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.gpu.sanitize

Without PyTorch's cache each tensor is an allocation of its own, so that an access past its end is seen.
"""

from __future__ import annotations

from typing import Any

import torch

from tests.unit.own_kernels import launches
from tests.unit.test_custom_ops import import_own


def main() -> None:
    import_own()
    for dtype in (torch.bfloat16, torch.float32):
        for name, arguments in launches(torch.device("cuda"), dtype):
            if name in ("attend", "mla_attend") and dtype == torch.float32:
                continue  # Made for half precision.
            operator: Any = getattr(torch.ops.inference_service, name).default
            operator(*arguments)
            torch.cuda.synchronize()
            print(name, dtype, flush=True)


if __name__ == "__main__":
    main()
