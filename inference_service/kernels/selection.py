"""Chooses a backend for each operator: the one forced in the configuration where it can run, else the one measured fastest, else the
support table's first that can."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from inference_service.config import ConfigError, Kernels
from inference_service.kernels import support
from inference_service.kernels.attention import FusedAttention, SplitAttention
from inference_service.kernels.attention_forms import FORMS, FormTable, FormTimes, FusedByTable, split_name
from inference_service.kernels.attention_mixed import StepAttention
from inference_service.kernels.fp8 import Fp8Gemm, Fp8Moe
from inference_service.kernels.gemm import Gemm
from inference_service.kernels.grouped_routing import GroupedRouting, TorchGroupedRouting
from inference_service.kernels.input_routing import InputRouting, TorchInputRouting
from inference_service.kernels.kv_append import KvAppend
from inference_service.kernels.mla import SplitMla, StepMla
from inference_service.kernels.mla_append import MlaAppend, TorchMlaAppend
from inference_service.kernels.mla_torch import TorchLatentDecode, TorchMlaPrefill, torch_mla_mixed
from inference_service.kernels.moe import Moe
from inference_service.kernels.norm import Norm
from inference_service.kernels.routing import Routing
from inference_service.kernels.sampling import Sampling
from inference_service.kernels.support import Setting
from inference_service.kernels.support_fp8 import DEQUANTIZED
from inference_service.messages import Kernel

log = logging.getLogger(__name__)

ATTENTION = ("attention_decode", "attention_prefill", "attention_mixed", "kv_append")
MLA = ("mla_decode", "mla_prefill", "mla_mixed", "mla_append")
OPERATORS = (*ATTENTION, *MLA, "routing", "grouped_routing", "input_routing", "moe", "moe_fp8", "gemm", "gemm_fp8", "norm", "sampling")

CHUNKS_ONLY = ("attention_prefill", "attention_mixed", "mla_prefill", "mla_mixed")
"""The operators that a step of decodes has no need of."""


def operators_of(setting: Setting) -> tuple[str, ...]:
    """Those that a model has."""
    routing = "grouped_routing" if setting.grouped else "input_routing" if support.INPUT_WEIGHTS in setting.features else "routing"
    fp8 = ("moe_fp8", "gemm_fp8") if support.FP8_WEIGHTS in setting.features else ()
    return (*(MLA if setting.latent else ATTENTION), routing, *fp8, "moe", "gemm", "norm", "sampling")


@dataclass(frozen=True)
class MlaOperators:
    """What stands for attention and append where the cache holds latents."""

    attention: SplitMla
    attention_mixed: StepMla
    append: MlaAppend


def mla_references() -> MlaOperators:
    return MlaOperators(SplitMla(TorchLatentDecode(), TorchMlaPrefill()), torch_mla_mixed(), TorchMlaAppend())


@dataclass(frozen=True)
class Operators:
    """One backend an operator: all that models know of kernels. What a model has no use for is the reference."""

    attention: SplitAttention
    attention_mixed: StepAttention
    """For steps with prefill that a CUDA graph holds."""
    kv_append: KvAppend
    routing: Routing
    moe: Moe
    gemm: Gemm
    norm: Norm
    sampling: Sampling
    gemm_fp8: Fp8Gemm | None = None
    """None, as with `moe_fp8`: weights in FP8 are made plain when they are loaded."""
    moe_fp8: Fp8Moe | None = None
    mla: MlaOperators = field(default_factory=mla_references)
    grouped_routing: GroupedRouting = field(default_factory=TorchGroupedRouting)
    input_routing: InputRouting = field(default_factory=TorchInputRouting)


@dataclass(frozen=True)
class Choice:
    """The backend chosen for an operator, and why."""

    row: support.Row
    reason: str
    table: FormTable | None = None
    """Of `attention_mixed`, where it was measured how eager steps attend fastest."""

    def message(self) -> Kernel:
        return Kernel(self.row.operator, self.row.backend, self.reason)


def select(forced: Kernels, setting: Setting, measured: Mapping[str, str] | None = None, mixed: Sequence[FormTimes] = ()) -> list[Choice]:
    """One choice for each operator of the model. A forced backend that cannot run is replaced, with a warning that names both and why.

    `measured` names the fastest backend of some operators; `mixed` are times of eager steps with decodes and chunks. Raises ConfigError,
    which names `kernels.<operator>`, for a backend that does not exist.
    """
    choices = [_choose(operator, getattr(forced, operator), setting, measured or {}) for operator in operators_of(setting)]
    if mixed and forced.attention_mixed == "auto":
        choices = _with_table(choices, setting, mixed)
    has_fp8 = any(choice.row.operator == "moe_fp8" and choice.row.backend != DEQUANTIZED for choice in choices)
    return [choice for choice in choices if not (has_fp8 and choice.row.operator == "moe")]


def make_operators(choices: list[Choice]) -> Operators:
    """Make the chosen backends."""
    made: dict[str, Any] = {row.operator: row.make() for row in support.TABLE if row.backend == "torch"}
    made |= {choice.row.operator: choice.row.make() for choice in choices}
    fused = made["attention_mixed"] if isinstance(made["attention_mixed"], FusedAttention) else _make_fused(choices)
    attention = SplitAttention(made.pop("attention_decode"), made.pop("attention_prefill"), fused)
    split = SplitMla(made.pop("mla_decode"), made.pop("mla_prefill"))
    mla = MlaOperators(split, made.pop("mla_mixed"), made.pop("mla_append"))
    return Operators(attention=attention, mla=mla, **made)


def _make_fused(choices: list[Choice]) -> FusedAttention | None:
    """The forms that the measured table has for some step; no others, since each takes memory."""
    table = next((choice.table for choice in choices if choice.table), None)
    if table is None or not table.forms:
        return None
    return FusedByTable(table, {row.backend: row.make() for row in support.rows("attention_mixed") if row.backend in table.forms})


def keeps_from_graph(choices: list[Choice]) -> list[Choice]:
    """The choices that keep a step of decodes from being captured as a CUDA graph."""
    return [choice for choice in choices if not choice.row.graph and choice.row.operator not in CHUNKS_ONLY]


def captures_mixed(choices: list[Choice]) -> bool:
    """Whether a CUDA graph can hold a step with prefill chunks, as far as their attention goes."""
    return all(choice.row.graph for choice in choices if choice.row.operator in ("attention_mixed", "mla_mixed"))


def multiplies_by_cutlass(choices: list[Choice]) -> bool:
    """Whether experts may run CUTLASS's kernels, which are tuned."""
    return any(choice.row.operator == "moe" and "cutlass" in choice.row.backend for choice in choices)


def fused_forms(setting: Setting) -> list[str]:
    """The forms beside split that measurement may choose among."""
    return [row.backend for row in support.rows("attention_mixed") if row.backend in FORMS and not row.refusal(setting)]


def split_of(choices: list[Choice]) -> tuple[support.Row, support.Row]:
    """The backends of the split form: for decodes and for prefill chunks."""
    rows = {choice.row.operator: choice.row for choice in choices}
    return rows["attention_decode"], rows["attention_prefill"]


def _with_table(choices: list[Choice], setting: Setting, mixed: Sequence[FormTimes]) -> list[Choice]:
    decode, prefill = split_of(choices)
    table = FormTable(mixed, split_name(decode.backend, prefill.backend), fused_forms(setting))
    return [
        replace(choice, reason=f"{choice.reason}; {table.describe()}", table=table) if choice.row.operator == "attention_mixed" else choice
        for choice in choices
    ]


def _choose(operator: str, wanted: str, setting: Setting, measured: Mapping[str, str]) -> Choice:
    rows = {row.backend: row for row in support.rows(operator)}
    if wanted != "auto" and wanted not in rows:
        raise ConfigError(f"kernels.{operator}: no backend {wanted!r}; there are: auto, {', '.join(rows)}")
    refusals = {backend: row.refusal(setting) for backend, row in rows.items()}
    able = [backend for backend, refusal in refusals.items() if not refusal]
    able.sort(key=lambda backend: not rows[backend].preferred(setting))
    if not able:
        raise ConfigError(f"kernels.{operator}: nothing runs here: {'; '.join(refusals.values())}")
    if measured.get(operator) in able:
        automatic = Choice(rows[measured[operator]], "measured fastest here")
    else:
        automatic = Choice(rows[able[0]], f"default on {setting.architecture} in {support.dtype_name(setting.dtype)}")
    if automatic.row.backend == DEQUANTIZED:
        why = next(iter(refusals.values()))
        automatic = Choice(automatic.row, f"made {support.dtype_name(setting.dtype)} at load, which takes more memory, since {why}")
    if wanted == "auto":
        return automatic
    if wanted in able:
        return Choice(rows[wanted], f"forced by kernels.{operator}")
    log.warning("kernels.%s: %s is forced but %s is used: %s", operator, wanted, automatic.row.backend, refusals[wanted])
    return Choice(automatic.row, f"{automatic.reason}, since {refusals[wanted]}")
