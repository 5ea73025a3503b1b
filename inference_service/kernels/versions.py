"""Versions of what backends are written in, found without importing it."""

from __future__ import annotations

import re
from importlib import metadata

import torch

PACKAGES = {"flashinfer": "flashinfer-python", "triton": "triton"}
CUDA_OF_FLASHINFER = {"sm_90": "12.3", "sm_100": "12.8", "sm_103": "12.9", "sm_110": "13.0", "sm_120": "12.9", "sm_121": "12.9"}
"""The CUDA version from which FlashInfer compiles for an architecture; older architectures demand none."""


def installed_versions() -> dict[str, str]:
    """The version of torch, and of flashinfer, triton and cuda (PyTorch's), as far as they are there."""
    found = {"torch": str(torch.__version__)}
    for name, distribution in PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def jit_cache_versions() -> dict[str, str]:
    """For which flashinfer and cuda the package of FlashInfer's compiled kernels was built, as far as it is there and says so."""
    try:
        flashinfer, _, build = metadata.version("flashinfer-jit-cache").partition("+")
    except metadata.PackageNotFoundError:
        return {}
    cuda = re.fullmatch(r"cu(\d+)(\d)", build)
    return {"flashinfer": flashinfer} | ({"cuda": f"{cuda[1]}.{cuda[2]}"} if cuda else {})


def at_least(version: str, lowest: str) -> bool:
    """Whether a version is no older; what follows its numbers, such as +cu130, does not count."""
    return _numbers(version) >= _numbers(lowest)


def _numbers(version: str) -> list[int]:
    match = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in match.group().split(".")] if match else []
