"""What a device can do at best, by its name: the bound that a time is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baselines.kernels.case import Work


@dataclass(frozen=True)
class Limits:
    """Of one device."""

    bandwidth: float
    """TB/s of memory, as measured: what copies and well-made kernels reach."""
    peak_bandwidth: float
    """TB/s of memory, as the vendor states it."""
    tflops: Mapping[str, float]
    """The vendor's, by the products' precision, dense."""

    def bound_us(self, work: Work) -> tuple[float, str]:
        """The least microseconds, and what demands them: memory or compute."""
        memory, compute = work.bytes / self.bandwidth / 1e6, work.flops / self.tflops[work.precision] / 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")


HOPPER = {"bfloat16": 989.0, "float16": 989.0, "float8": 1979.0, "float32": 67.0}
LIMITS = {"H200": Limits(4.3, 4.8, HOPPER)}
"""By a part of the device's name."""


def limits_of(device: str) -> Limits | None:
    """None where nothing is known."""
    return next((limits for name, limits in LIMITS.items() if name in device), None)
