"""Chooses a backend for each operator: the one forced in the configuration where it can run, else the support table's first that can."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from inference_service.config import ConfigError, Kernels
from inference_service.kernels import support
from inference_service.kernels.attention import Attention
from inference_service.kernels.gemm import Gemm
from inference_service.kernels.moe import Moe
from inference_service.kernels.norm import Norm
from inference_service.kernels.rope import Rope
from inference_service.kernels.sampling import Sampling
from inference_service.messages import Kernel

log = logging.getLogger(__name__)

OPERATORS = ("attention", "moe", "gemm", "norm", "rope", "sampling")


@dataclass(frozen=True)
class Operators:
    """One backend an operator: all that models know of kernels."""

    attention: Attention
    moe: Moe
    gemm: Gemm
    norm: Norm
    rope: Rope
    sampling: Sampling


@dataclass(frozen=True)
class Choice:
    """The backend chosen for an operator, and why."""

    row: support.Row
    reason: str

    def message(self) -> Kernel:
        return Kernel(self.row.operator, self.row.backend, self.reason)


def select(forced: Kernels, architecture: str, dtype: torch.dtype) -> list[Choice]:
    """One choice an operator. A forced backend that cannot run is replaced, with a warning that names both and the reason.

    Raises ConfigError, which names `kernels.<operator>`, for a backend that does not exist.
    """
    return [_choose(operator, getattr(forced, operator), architecture, dtype) for operator in OPERATORS]


def make_operators(choices: list[Choice]) -> Operators:
    """Make the chosen backends."""
    return Operators(**{choice.row.operator: choice.row.make() for choice in choices})


def _choose(operator: str, wanted: str, architecture: str, dtype: torch.dtype) -> Choice:
    rows = support.rows(operator)
    known = [row.backend for row in rows]
    if wanted != "auto" and wanted not in known:
        raise ConfigError(f"kernels.{operator}: no backend {wanted!r}; there are: auto, {', '.join(known)}")
    able = [row for row in rows if not row.refusal(architecture, dtype)]
    if not able:
        raise ConfigError(f"kernels.{operator}: nothing runs here: {'; '.join(row.refusal(architecture, dtype) for row in rows)}")
    automatic = Choice(able[0], f"default on {architecture} in {support.dtype_name(dtype)}")
    if wanted == "auto":
        return automatic
    row = next(row for row in rows if row.backend == wanted)
    refusal = row.refusal(architecture, dtype)
    if not refusal:
        return Choice(row, f"forced by kernels.{operator}")
    log.warning("kernels.%s: %s is forced but %s is used: %s", operator, wanted, automatic.row.backend, refusal)
    return Choice(automatic.row, f"{automatic.reason}, since {refusal}")
