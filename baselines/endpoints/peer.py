"""What a peer's file tells: how its server is started from the one YAML file, and where it shows its metrics."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from inference_service.config import Config

Operator = Literal["attention_decode", "attention_prefill", "attention_mixed"]


@dataclass(frozen=True)
class Site:
    """Where a server is to run, and what for."""

    config: Config
    file: Path
    """The YAML file of `config`."""
    directory: Path
    """For files that a server is given, or writes."""
    name: str
    """The target's, for the names of these files."""
    model: str
    """The model's directory, or the target's own `model`."""
    host: str
    port: int
    program: str = ""
    """The target's own `program`."""
    traces: str = ""
    """HOST:PORT of an OTLP gRPC receiver; empty: no traces are wanted."""

    @property
    def python(self) -> str:
        return self.program or sys.executable

    @property
    def on_cpu(self) -> bool:
        return on_cpu(self.config)

    @property
    def cores(self) -> list[int]:
        """Those that the server computes on, on a CPU."""
        mine = sorted(os.sched_getaffinity(0))
        return mine[: self.config.device.threads or None]

    @property
    def dtype(self) -> str:
        """`model.dtype` as ours understands it: auto is float32 on a CPU, else the checkpoint's."""
        return "float32" if self.config.model.dtype == "auto" and self.on_cpu else self.config.model.dtype


def on_cpu(config: Config) -> bool:
    """Whether servers of this file run on the CPU."""
    return config.device.kind == "cpu" or (config.device.kind == "auto" and not shutil.which("nvidia-smi"))


@dataclass(frozen=True)
class Launch:
    """How to start a server."""

    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What a reader of its figures must know: settings that it has no equivalent for, and what it is."""


@dataclass(frozen=True)
class Peer:
    """A server that we compare with."""

    title: str
    install: str
    """How to get it."""
    launch: Callable[[Site], Launch]
    package: str = ""
    """The Python package that must be there, under the name of its distribution; empty: it is an executable."""
    executable: str = ""
    metrics: str = ""
    """The path of its metrics; empty: it has none."""


def flags(**values: object) -> list[str]:
    """--max-model-len 2048 for max_model_len=2048; True is a flag alone, and None, False and "" are left out."""
    words: list[str] = []
    for name, value in values.items():
        if value is None or value is False or value == "":
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return words


def forced(config: Config, operator: Operator, equivalents: Mapping[str, str], notes: list[str], title: str) -> str:
    """The peer's name for the backend that is forced for an operator, or "", with a note where it has none."""
    backend: str = getattr(config.kernels, operator)
    if backend == "auto":
        return ""
    if backend not in equivalents:
        notes.append(f"kernels.{operator}: {backend} has no equivalent in {title}, which chooses by itself")
    return equivalents.get(backend, "")


def forced_both(config: Config, equivalents: Mapping[str, str], notes: list[str], title: str) -> str:
    """The same for a peer that has one switch for decode and prefill: the decode's goes first."""
    decode = forced(config, "attention_decode", equivalents, notes, title)
    prefill = forced(config, "attention_prefill", equivalents, notes, title)
    if decode and prefill and decode != prefill:
        notes.append(f"kernels.attention_prefill: {title} has one switch for all attention, which attention_decode has set to {decode}")
    return decode or prefill


def note_other_kernels(config: Config, mapped: set[str], notes: list[str], title: str) -> None:
    """A note for each backend that is forced for an operator of which the peer has no switch."""
    for operator, backend in msgspec.to_builtins(config.kernels).items():
        if backend != "auto" and operator not in mapped:
            notes.append(f"kernels.{operator}: {backend} has no equivalent in {title}, which chooses by itself")


def note_dummy(config: Config, notes: list[str], title: str) -> None:
    """For peers that cannot make up weights."""
    if config.model.load_format == "dummy":
        notes.append(f"model.load_format: dummy has no equivalent in {title}, which needs a checkpoint with weights")


def dtype_of(site: Site, known: set[str], notes: list[str], title: str) -> str:
    """The dtype for a peer that knows but some; "" and a note for another."""
    if site.dtype in known:
        return site.dtype
    if site.dtype != "auto":
        notes.append(f"model.dtype: {site.dtype} has no equivalent in {title}, which runs the checkpoint's")
    return ""
