"""In which order a comparison measures: all servers up at once and each cell going from one to the next, or blocks A B A on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baselines.cells import Cell
from baselines.endpoints.peer import on_cpu
from baselines.memory import available_gib
from inference_service.config import Config

INTERLEAVED, BLOCKS = "interleaved", "blocks"
_PROGRAM_GIB = 2.0
"""Of a server on a CPU, beside weights and cache."""
_GIB = 2**30


@dataclass(frozen=True)
class Step:
    """One measurement."""

    target: str
    cell: Cell
    block: int = 1
    """The target's how manieth start, from 1; the repeats of a block share it. 1 where all are up at once."""
    repeat: int = 0
    """Within the block, from 0."""
    schedule: str = BLOCKS

    @property
    def round(self) -> str:
        """What tells its prompts from those of the cell's other measurements of the same target; "" for the first."""
        return f"{self.block}.{self.repeat}" if (self.block, self.repeat) != (1, 0) else ""


def interleaved(targets: Sequence[str], cells: Sequence[Cell], repeats: int) -> list[Step]:
    """Cell by cell, each of which goes around the targets; backwards in every other repeat, so that none always comes first."""
    rounds = [list(targets) if repeat % 2 == 0 else list(reversed(targets)) for repeat in range(repeats)]
    return [Step(target, cell, 1, repeat, INTERLEAVED) for repeat, order in enumerate(rounds) for cell in cells for target in order]


def blocks(targets: Sequence[str], cells: Sequence[Cell], repeats: int) -> list[Step]:
    """A B A: the first target's second block tells what has drifted since its first."""
    order = [(target, 1) for target in targets]
    if len(targets) > 1:
        order.append((targets[0], 2))
    return [Step(target, cell, block, repeat) for target, block in order for repeat in range(repeats) for cell in cells]


def is_interleaved(config: Config, targets: Sequence[str], model: Path | None) -> tuple[bool, str]:
    """Whether to interleave, and why."""
    wanted = config.comparison.interleave
    if wanted != "auto":
        return wanted, "comparison.interleave says so"
    if len(targets) < 2:
        return False, "one target is measured"
    if not on_cpu(config):
        share = len(targets) * config.cache.gpu_memory_fraction
        return share <= 1, f"{len(targets)} servers would take {share:.0%} of the GPU's memory (cache.gpu_memory_fraction)"
    # Weights may be computed with in twice their size on disk.
    weights_gib = 2 * sum(file.stat().st_size for file in model.glob("*.safetensors")) / _GIB if model else 0.0
    needed_gib, there_gib = len(targets) * (weights_gib + config.cache.memory_gib + _PROGRAM_GIB), available_gib() or 0.0
    return needed_gib <= there_gib, f"{len(targets)} servers need about {needed_gib:.1f} GiB, {there_gib:.1f} are there"
