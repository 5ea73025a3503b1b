"""Versions of what backends are written in, found without importing it."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

PACKAGES = {"flashinfer": "flashinfer-python", "triton": "triton"}
CUDA_OF_FLASHINFER = {"sm_90": "12.3", "sm_100": "12.8", "sm_103": "12.9", "sm_110": "13.0", "sm_120": "12.9", "sm_121": "12.9"}
"""The CUDA version from which FlashInfer compiles for an architecture; older architectures demand none."""


def installed_versions() -> dict[str, str]:
    """The version of torch, and of flashinfer, triton, cuda (PyTorch's) and nvcc, as far as they are there."""
    found = {"torch": str(torch.__version__)}
    for name, distribution in PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    found |= {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return found | ({"nvcc": nvcc} if (nvcc := _nvcc_version()) else {})


@cache
def _nvcc_version() -> str:
    """Of the compiler that DeepGEMM would start, which it looks for in the same places; empty where there is none."""
    home = os.environ.get("CUDA_HOME")
    compiler = os.environ.get("TRTLLM_DG_NVCC_COMPILER") or (str(Path(home, "bin", "nvcc")) if home else "nvcc")
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else ""


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
