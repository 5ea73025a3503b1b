"""Chooses a backend for each operator: the one forced in the configuration where it can run, else the one measured fastest, else the
support table's first that can."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference_service.config import ConfigError, Kernels
from inference_service.kernels import support
from inference_service.kernels.attention import SplitAttention
from inference_service.kernels.attention_mixed import StepAttention
from inference_service.kernels.gemm import Gemm
from inference_service.kernels.kv_append import KvAppend
from inference_service.kernels.moe import Moe
from inference_service.kernels.norm import Norm
from inference_service.kernels.routing import Routing
from inference_service.kernels.sampling import Sampling
from inference_service.kernels.support import Setting
from inference_service.messages import Kernel

log = logging.getLogger(__name__)

OPERATORS = ("attention_decode", "attention_prefill", "attention_mixed", "kv_append", "routing", "moe", "gemm", "norm", "sampling")


@dataclass(frozen=True)
class Operators:
    """One backend an operator: all that models know of kernels."""

    attention: SplitAttention
    attention_mixed: StepAttention
    """For steps with prefill that a CUDA graph holds."""
    kv_append: KvAppend
    routing: Routing
    moe: Moe
    gemm: Gemm
    norm: Norm
    sampling: Sampling


@dataclass(frozen=True)
class Choice:
    """The backend chosen for an operator, and why."""

    row: support.Row
    reason: str

    def message(self) -> Kernel:
        return Kernel(self.row.operator, self.row.backend, self.reason)


def select(forced: Kernels, setting: Setting, measured: Mapping[str, str] | None = None) -> list[Choice]:
    """One choice an operator. A forced backend that cannot run is replaced, with a warning that names both and the reason.

    `measured` names the fastest backend of some operators. Raises ConfigError, which names `kernels.<operator>`, for a backend that does
    not exist.
    """
    return [_choose(operator, getattr(forced, operator), setting, measured or {}) for operator in OPERATORS]


def make_operators(choices: list[Choice]) -> Operators:
    """Make the chosen backends."""
    made: dict[str, Any] = {choice.row.operator: choice.row.make() for choice in choices}
    attention = SplitAttention(made.pop("attention_decode"), made.pop("attention_prefill"))
    return Operators(attention=attention, **made)


def keeps_from_graph(choices: list[Choice]) -> list[Choice]:
    """The choices that keep a step of decodes from being captured as a CUDA graph."""
    return [choice for choice in choices if not choice.row.graph and choice.row.operator not in ("attention_prefill", "attention_mixed")]


def _choose(operator: str, wanted: str, setting: Setting, measured: Mapping[str, str]) -> Choice:
    rows = {row.backend: row for row in support.rows(operator)}
    if wanted != "auto" and wanted not in rows:
        raise ConfigError(f"kernels.{operator}: no backend {wanted!r}; there are: auto, {', '.join(rows)}")
    refusals = {backend: row.refusal(setting) for backend, row in rows.items()}
    able = [backend for backend, refusal in refusals.items() if not refusal]
    if not able:
        raise ConfigError(f"kernels.{operator}: nothing runs here: {'; '.join(refusals.values())}")
    if measured.get(operator) in able:
        automatic = Choice(rows[measured[operator]], "measured fastest here")
    else:
        automatic = Choice(rows[able[0]], f"default on {setting.architecture} in {support.dtype_name(setting.dtype)}")
    if wanted == "auto":
        return automatic
    if wanted in able:
        return Choice(rows[wanted], f"forced by kernels.{operator}")
    log.warning("kernels.%s: %s is forced but %s is used: %s", operator, wanted, automatic.row.backend, refusals[wanted])
    return Choice(automatic.row, f"{automatic.reason}, since {refusals[wanted]}")
