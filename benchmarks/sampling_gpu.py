"""Drawing tokens from a vocabulary of 151,936 in bfloat16, and routing, inside a CUDA graph.

python -m benchmarks.sampling_gpu
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu_timing import graph_us
from inference_service.kernels.triton_routing import route
from inference_service.kernels.triton_sampling import draw, greedy

VOCABULARY = 151936


def drawing(rows: int, top_k: int, top_p: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    seeds, positions = torch.arange(rows, device="cuda"), column(7, torch.int32)
    columns = column(0.8), column(top_k, torch.int32), column(top_p), column(0.0), seeds, positions
    return lambda logits_RV: draw(logits_RV, *columns)


def main() -> None:
    for rows in (1, 8, 32, 128, 256):
        logits = [torch.randn(rows, VOCABULARY, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        ways: dict[str, Callable[..., torch.Tensor]] = {
            "torch.argmax": partial(torch.argmax, dim=-1),
            "greedy": greedy,
            "plain": drawing(rows, 0, 1.0),
            "top-p 0.95": drawing(rows, 0, 0.95),
            "top-k 50": drawing(rows, 50, 1.0),
            "top-k 50, top-p 0.95": drawing(rows, 50, 0.95),
        }
        for name, run in ways.items():
            print(f"{rows:4} rows: {name:22} {graph_us([partial(run, logits_RV) for logits_RV in logits]):8.1f} us", flush=True)
    for tokens in (1, 32, 256, 4096):
        scores = torch.randn(tokens, 128, device="cuda", dtype=torch.bfloat16)
        print(f"{tokens:4} tokens: routing {graph_us([partial(route, scores, 8, True)] * 16):8.1f} us", flush=True)


if __name__ == "__main__":
    main()
