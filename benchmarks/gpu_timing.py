"""Times GPU operators as a step runs them: inside a CUDA graph, one call after the other, each on weights that the caches do not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Microseconds a call. The calls are captured in one graph, which is replayed; the best of three runs counts."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times: list[float] = []
        for _ in range(3):
            graph.replay()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(stream)
            for _ in range(replays):
                graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / replays / len(calls))
    return min(times)
