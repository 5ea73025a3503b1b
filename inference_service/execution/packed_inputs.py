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
    mixed: bool = False
    """Whether it is a graph's that prefill chunks may be part of; all that is left over is padding."""

    @property
    def bytes(self) -> int:
        return list(_places(self))[-1][-1]

    def holds(self, other: Sizes) -> bool:
        """Whether such a block has room for a step of the other's sizes and kind."""
        return (
            self.mixed == other.mixed
            and self.tokens >= other.tokens
            and self.rows >= other.rows
            and self.samples >= other.samples
            and self.pages >= other.pages
        )


@dataclass(frozen=True)
class Fields:
    """The inputs, as arrays on the host or tensors on the device."""

    token_ids_T: Any
    """int64; -1 where a decode row's id is still to come from its slot."""
    slots_R: Any
    """int64."""
    slots_N: Any
    """int64: the slots of the rows that sample."""
    last_N: Any
    """int64: the last token of each row that samples."""
    seed_N: Any
    """int64, all 64 bits of it."""
    positions_T: Any
    """int32, as all that follow but the three of float32. Negative: a padded token, which stands at -1 - position and writes nothing."""
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
DTYPES |= dict.fromkeys(("token_ids_T", "slots_R", "slots_N", "last_N", "seed_N"), torch.int64)
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
    lengths_R: NDArray[np.int64]
    contexts_R: NDArray[np.int64]
    greedy: bool
    """Whether no row draws at random."""
    captured: bool = False
    """Whether a CUDA graph is captured from it."""

    def layout(self, fields: Fields) -> StepLayout:
        lengths, contexts = self.lengths_R.tolist(), self.contexts_R.tolist()
        tensors = fields.positions_T, fields.row_T, fields.pages_RM, fields.contexts_R
        return StepLayout(self.decodes, lengths, contexts, *tensors, self.captured)


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

    def width(self, context: int) -> int:
        """Of the page table, for such a context."""
        return _round_up(-(-context // self.page_size), PAGES_STEP)

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
        context = max([row.start + row.length for row in rows])
        samples = [row.samples for row in rows].count(True)
        return Sizes(sum([row.length for row in rows]), len(rows), samples, self.width(context))

    def write(self, rows: list[Row], sizes: Sizes, block: NDArray[np.uint8]) -> PackedStep:
        """Write the step into a block, and padding where there is more room than the rows need."""
        self.update(rows)
        fields = host_fields(block, sizes)
        slots_R = np.array([row.slot for row in rows], np.int64)
        lengths_R = np.array([row.length for row in rows], np.int64)
        contexts_R = np.array([row.start for row in rows], np.int64) + lengths_R
        samples_R = np.array([row.samples for row in rows], np.bool_)
        chunks = [row.token_ids for row in rows if row.token_ids]
        decodes = len(rows) - len(chunks)

        ends_R = lengths_R.cumsum()
        tokens = int(ends_R[-1]) if rows else 0
        fields.token_ids_T[:decodes] = -1
        if chunks:
            fields.token_ids_T[decodes:tokens] = np.fromiter(chain.from_iterable(chunks), np.int64, tokens - decodes)
        fields.row_T[:tokens] = np.repeat(np.arange(len(rows)), lengths_R)
        fields.positions_T[:tokens] = np.arange(tokens) + np.repeat(contexts_R - ends_R, lengths_R)
        fields.slots_R[: len(rows)] = slots_R
        fields.contexts_R[: len(rows)] = contexts_R
        np.take(self._pages_SM[:, : sizes.pages], slots_R, axis=0, out=fields.pages_RM[: len(rows)], mode="clip")

        slots_N = slots_R[samples_R]
        fields.slots_N[: len(slots_N)] = slots_N
        fields.last_N[: len(slots_N)] = ends_R[samples_R] - 1
        fields.position_N[: len(slots_N)] = contexts_R[samples_R]

        _pad(fields, tokens, decodes, len(rows))
        fields.slots_R[len(rows) :] = self.padding
        fields.slots_N[len(slots_N) :] = self.padding
        fields.last_N[len(slots_N) :] = 0
        fields.position_N[len(slots_N) :] = 0
        for name, values_S in (
            ("seed_N", self._seed_S),
            ("top_k_N", self._top_k_S),
            ("temperature_N", self._temperature_S),
            ("top_p_N", self._top_p_S),
            ("min_p_N", self._min_p_S),
        ):
            np.take(values_S, fields.slots_N, out=getattr(fields, name), mode="clip")
        return PackedStep(sizes, decodes, lengths_R, contexts_R, not fields.temperature_N.any())


def _pad(fields: Fields, tokens: int, decodes: int, rows: int) -> None:
    """Make padded tokens and rows twins of a real one that writes nothing: they choose the same experts, whose weights are read anyway, if
    not once more for 16 twins.

    Of decodes it is the one with the shortest context, since a padded row attends like any other.
    """
    token, position, context, pages = 0, -1, 1, 0
    twin = 0
    if rows:
        twin = int(fields.contexts_R[:decodes].argmin()) if decodes else 0
        token, position = fields.token_ids_T[twin], -1 - fields.positions_T[twin]
        context, pages = fields.contexts_R[twin], fields.pages_RM[twin]
    fields.token_ids_T[tokens:] = token
    fields.row_T[tokens:] = twin
    fields.positions_T[tokens:] = position
    fields.contexts_R[rows:] = context
    fields.pages_RM[rows:] = pages


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
