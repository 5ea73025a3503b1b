"""Rotary embedding: what config.json says of it, and the table of angles.

Shapes: P positions, D head dim, R of which are rotated.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_service.models.config_json import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `kind` is default, linear (all angles slower by `factor`), llama3 and yarn (only the slow ones), or longrope (each
    angle slower by a factor of its own)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """Whether yarn's blend begins and ends at whole angles."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    """Of longrope: the factors up to the original context, and beyond."""
    magnitude: float = 1.0
    """Cosines and sines are larger by this."""
    partial: float = 1.0
    """The share of a head's dimensions that is rotated."""

    def rotated(self, head_dim: int) -> int:
        """R, the first dimensions of a head, which are rotated."""
        return int(head_dim * self.partial)


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Both forms: rope_theta beside rope_scaling, and rope_parameters with all in one. Raises ModelError, which names the field."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    partial = scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in READERS:
        raise ModelError(f"rope scaling {kind!r} is not supported; supported are {', '.join(READERS)}")
    try:
        return RopeConfig(theta, kind, partial=float(partial), **READERS[kind](scaling, raw))
    except KeyError as error:
        raise ModelError(f"rope scaling {kind!r} lacks {error.args[0]}") from None
    except (TypeError, ValueError) as error:
        raise ModelError(f"rope scaling {kind!r}: {error}") from None


def _default(scaling: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    return {}


def _linear(scaling: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    return {"factor": float(scaling["factor"])}


def _llama3(scaling: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    floats = {name: float(scaling[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
    return floats | {"original_max_position_embeddings": int(scaling["original_max_position_embeddings"])}


def _yarn(scaling: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """The magnitude is DeepSeek's ratio of two where `mscale` and `mscale_all_dim` are given."""
    factor, scale, all_dim = float(scaling["factor"]), scaling.get("mscale"), scaling.get("mscale_all_dim")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    derived = magnitude(scale) / magnitude(all_dim) if scale and all_dim else magnitude(1.0)
    return {
        "factor": factor,
        "original_max_position_embeddings": int(scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]),
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "truncate": bool(scaling.get("truncate", True)),
        "magnitude": float(scaling.get("attention_factor") or derived),
    }


def _longrope(scaling: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    original = int(raw.get("original_max_position_embeddings") or scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or raw["max_position_embeddings"] / original)
    derived = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "short_factor": tuple(map(float, scaling["short_factor"])),
        "long_factor": tuple(map(float, scaling["long_factor"])),
        "magnitude": float(scaling.get("attention_factor") or derived),
    }


READERS = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def rotary_table(rope: RopeConfig, head_dim: int, positions: int, device: torch.device) -> Tensor:
    """table_PD, float32: for each position the cosines of the D/2 angles, then their sines. Pairs that are not rotated stand last.

    Longrope's short factors hold where no position exceeds the original context, and the long ones, with a warning, for every sequence
    otherwise: the cache outlives the moment when a sequence grows beyond. transformers takes the short ones for short sequences even then.
    """
    frequencies = _frequencies(rope, rope.rotated(head_dim), positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), frequencies.to(device))
    table_P2R = torch.stack((angles.cos(), angles.sin()), dim=1) * rope.magnitude
    table_P2D = torch.zeros(positions, 2, head_dim // 2, device=device)
    table_P2D[:, 0] = 1.0
    table_P2D[..., : len(frequencies)] = table_P2R
    return table_P2D.flatten(1)


def _frequencies(rope: RopeConfig, dims: int, positions: int) -> Tensor:
    """Radians a position, for each pair of dimensions."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, dims, 2, dtype=torch.int64).float() / dims)
    original = rope.original_max_position_embeddings
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "longrope":
        if positions > original:
            log.warning("longrope: long factors for all; model.max_context of %d or less has the short ones", original)
        factors = rope.long_factor if positions > original else rope.short_factor
        return frequencies / torch.tensor(factors)
    if rope.kind == "yarn":
        keep = _yarn_keep(rope, dims)
    else:
        # llama3: keep angles that turn often within the original context, slow those that turn seldom, and blend between.
        turns = original * frequencies / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / rope.factor)


def _yarn_keep(rope: RopeConfig, dims: int) -> Tensor:
    """As llama3, but the blend is linear in the pair's index, from the one that turns `beta_fast` times to that of `beta_slow`."""

    def pair(turns: float) -> float:
        return dims * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    return 1 - ((torch.arange(dims // 2) - first) / max(last - first, 1e-3)).clamp(0, 1)
