"""How long a launch takes: on a GPU inside a CUDA graph, each call on inputs that the caches do not hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch

from baselines.kernels.case import Call, Work
from inference_service.kernels.expert_tactics import microseconds

MOST_COPIES = 64
GRAPH_US = 1000.0
"""How long a graph is to take at least, so that its launch does not count."""
MOST_CALLS = 200
"""Of a graph, unless there are more copies."""
STREAM_CALLS = 15
"""How many calls are timed where no graph can hold them."""
REPLAY_US = 20_000.0
"""How long all replays are to take."""
MOST_REPLAYS = 10
CPU_S = 0.2
"""How long a CPU runs a case."""


@dataclass(frozen=True)
class Timing:
    us: float
    """The median."""
    timed: str
    """graph; stream, where no graph can hold the calls; or host."""


def copies_for(work: Work, device: torch.device) -> int:
    """How many copies of the inputs it takes for twice the L2 cache."""
    if device.type != "cuda":
        return 1
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, -(-2 * cache // max(int(work.bytes), 1))))


def measure(calls: Sequence[Call], device: torch.device, capturable: bool) -> Timing:
    """The first of the calls has run before. Raises RuntimeError where the device has become unusable."""
    if device.type != "cuda":
        return Timing(_on_host(calls), "host")
    if capturable:
        wanted = min(MOST_CALLS, int(GRAPH_US / microseconds(calls[0], 1)))
        with suppress(RuntimeError):  # the capture's: no graph can hold it
            return Timing(_in_graph([calls[index % len(calls)] for index in range(max(len(calls), wanted))]), "graph")
        torch.cuda.synchronize()
    return Timing(median(microseconds(calls[index % len(calls)], 1) for index in range(STREAM_CALLS)), "stream")


def _in_graph(calls: Sequence[Call]) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not by torch.cuda.graph, which gives all memory back before each capture: that takes longer than what is timed.
        graph.capture_begin()
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        replay = graph.replay
        replay()
        total = microseconds(replay, 1)
        replays = max(3, min(MOST_REPLAYS, int(REPLAY_US / total)))
        return median(microseconds(replay, 1) for _ in range(replays)) / len(calls)


def _on_host(calls: Sequence[Call]) -> float:
    times: list[float] = []
    end = time.perf_counter() + CPU_S
    while not times or time.perf_counter() < end:
        begin = time.perf_counter()
        calls[len(times) % len(calls)]()
        times.append(1e6 * (time.perf_counter() - begin))
    return median(times)
