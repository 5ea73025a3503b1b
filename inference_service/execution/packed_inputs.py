"""A step's inputs in one block of memory: written on the host, copied to the device at once, and read there through views.

Shapes: T tokens, R rows, N rows that sample, M pages of a row of the page table, S slots (the last one is that of padding).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from inference_service.engine.step import Row
from inference_service.execution.batch import check_rows
from inference_service.kernels.attention import StepLayout
from inference_service.messages import Sampling

ALIGNMENT = 64
"""Bytes. Triton compiles a kernel anew for a pointer that is aligned less, so every field begins at a multiple."""
PAGES_STEP = 16
"""The page table's width is a multiple, for the same reason."""
ALL = (1 << 31) - 1
"""As top_k: more than any vocabulary."""
NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}


@dataclass(frozen=True)
class Sizes:
    """How much of everything a block holds."""

    tokens: int
    rows: int
    samples: int
    pages: int

    @property
    def bytes(self) -> int:
        return list(_places(self))[-1][-1]


@dataclass(frozen=True)
class Fields:
    """The inputs, as arrays on the host or tensors on the device."""

    token_ids_T: Any
    """int64; 0 where a decode row's id is still to come from its slot."""
    slots_N: Any
    """int64; decode rows come first."""
    last_N: Any
    """int64: the last token of each row that samples."""
    seed_N: Any
    """int64, all 64 bits of it."""
    positions_T: Any
    """int32, as all that follow but the three of float32. -1: a padded row, which writes nothing to the cache."""
    row_T: Any
    contexts_R: Any
    position_N: Any
    """Where the drawn token will stand in its sequence."""
    top_k_N: Any
    temperature_N: Any
    """float32; 0 is greedy."""
    top_p_N: Any
    """float32."""
    min_p_N: Any
    """float32."""
    pages_RM: Any


DTYPES: dict[str, torch.dtype] = dict.fromkeys(Fields.__annotations__, torch.int32)
DTYPES |= dict.fromkeys(("token_ids_T", "slots_N", "last_N", "seed_N"), torch.int64)
DTYPES |= dict.fromkeys(("temperature_N", "top_p_N", "min_p_N"), torch.float32)


def _places(sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and end of each field."""
    extents = {"T": sizes.tokens, "R": sizes.rows, "N": sizes.samples, "RM": sizes.rows * sizes.pages}
    end = 0
    for name, dtype in DTYPES.items():
        first = _round_up(end, ALIGNMENT)
        end = first + extents[name.rsplit("_", 1)[-1]] * dtype.itemsize
        yield name, first, end


def host_fields(block: NDArray[np.uint8], sizes: Sizes) -> Fields:
    """The fields of a block of bytes in the host's memory."""
    views = {name: block[first:end].view(NUMPY[DTYPES[name]]) for name, first, end in _places(sizes)}
    views["pages_RM"] = views["pages_RM"].reshape(sizes.rows, sizes.pages)
    return Fields(**views)


def device_fields(block: Tensor, sizes: Sizes) -> Fields:
    """The fields of a block of bytes in the device's memory."""
    views = {name: block[first:end].view(DTYPES[name]) for name, first, end in _places(sizes)}
    views["pages_RM"] = views["pages_RM"].view(sizes.rows, sizes.pages)
    return Fields(**views)


@dataclass(frozen=True)
class PackedStep:
    """What the host knows of a step beside its fields, and what gives the shapes."""

    sizes: Sizes
    decodes: int
    lengths: list[int]
    contexts: list[int]
    greedy: bool
    """Whether no row draws at random."""

    def layout(self, fields: Fields) -> StepLayout:
        return StepLayout(self.decodes, self.lengths, self.contexts, fields.positions_T, fields.row_T, fields.pages_RM, fields.contexts_R)


class SlotTable:
    """What the host knows of each slot's request: written when it changes, and gathered by slot for each step."""

    def __init__(self, max_requests: int, max_pages: int, page_size: int) -> None:
        self.padding, self.page_size = max_requests, page_size
        self.max_pages = _round_up(max_pages, PAGES_STEP)
        slots = max_requests + 1
        self._pages_SM = np.zeros((slots, self.max_pages), np.int32)
        self._seed_S = np.zeros(slots, np.int64)
        self._top_k_S = np.full(slots, ALL, np.int32)
        self._temperature_S = np.zeros(slots, np.float32)
        self._top_p_S = np.ones(slots, np.float32)
        self._min_p_S = np.zeros(slots, np.float32)
        self._pages: list[list[int]] = [[] for _ in range(slots)]
        self._sampling: list[Sampling | None] = [None] * slots

    def update(self, rows: list[Row]) -> None:
        """Take in what has changed: a new request, a page more, or a page that was replaced by an equal one of the prefix cache."""
        for row in rows:
            if self._pages[row.slot] != row.pages:
                self._pages_SM[row.slot, : len(row.pages)] = row.pages
                self._pages[row.slot] = row.pages.copy()
            if self._sampling[row.slot] is not row.sampling:
                self._set_sampling(row.slot, row.sampling)

    def _set_sampling(self, slot: int, sampling: Sampling) -> None:
        self._sampling[slot] = sampling
        self._seed_S[slot : slot + 1].view(np.uint64)[0] = sampling.seed & (1 << 64) - 1
        self._top_k_S[slot] = sampling.top_k or ALL
        self._temperature_S[slot] = sampling.temperature
        self._top_p_S[slot] = sampling.top_p
        self._min_p_S[slot] = sampling.min_p

    def measure(self, rows: list[Row]) -> Sizes:
        """What a block must hold for these rows, without padding. Raises ValueError for an impossible row."""
        check_rows(rows, self.page_size)
        pages = -(-max(row.start + row.length for row in rows) // self.page_size)
        return Sizes(sum(row.length for row in rows), len(rows), sum(row.samples for row in rows), _round_up(pages, PAGES_STEP))

    def write(self, rows: list[Row], sizes: Sizes, block: NDArray[np.uint8]) -> PackedStep:
        """Write the step into a block. Where `sizes` has more rows than there are, all must be decodes, and padded rows follow them."""
        self.update(rows)
        padded = sizes.rows - len(rows)
        fields = host_fields(block, sizes)
        slots_R = np.array([row.slot for row in rows] + [self.padding] * padded, np.int64)
        starts_R = np.array([row.start for row in rows] + [-1] * padded, np.int32)
        lengths_R = np.array([row.length for row in rows] + [1] * padded, np.int32)

        decodes = sum(not row.token_ids for row in rows) + padded
        fields.token_ids_T[:decodes] = 0
        if sizes.tokens > decodes:
            fields.token_ids_T[decodes:] = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, sizes.tokens - decodes)
        ends_R = np.cumsum(lengths_R)
        fields.row_T[:] = np.repeat(np.arange(sizes.rows, dtype=np.int32), lengths_R)
        fields.positions_T[:] = np.arange(sizes.tokens) + np.repeat(starts_R + lengths_R - ends_R, lengths_R)
        # A padded row attends to one slot of any page, since no kernel is sure to take an empty context.
        np.maximum(starts_R + lengths_R, 1, out=fields.contexts_R)
        np.take(self._pages_SM[:, : sizes.pages], slots_R, axis=0, out=fields.pages_RM, mode="clip")

        samples_R = slice(None) if sizes.samples == sizes.rows else np.array([row.samples for row in rows])
        slots_N = slots_R[samples_R]
        fields.slots_N[:] = slots_N
        fields.last_N[:] = ends_R[samples_R] - 1
        fields.position_N[:] = fields.contexts_R[samples_R]
        for name, values_S in (
            ("seed_N", self._seed_S),
            ("top_k_N", self._top_k_S),
            ("temperature_N", self._temperature_S),
            ("top_p_N", self._top_p_S),
            ("min_p_N", self._min_p_S),
        ):
            np.take(values_S, slots_N, out=getattr(fields, name), mode="clip")
        return PackedStep(sizes, decodes, lengths_R.tolist(), fields.contexts_R.tolist(), not fields.temperature_N.any())


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
