"""What changes a row's logits before its token is drawn: a grammar's mask, logit bias, penalties and bans, in this order.

The host packs what the rows ask for. What has occurred is counted on the device: with steps overlapped, a decode's last token is not on
the host yet.

Shapes: N rows that sample, V vocabulary, S slots; of the N, G with a grammar, P with penalties, B with bans; L biased logits,
D slots that count one more token, H slots that begin to count, I and O tokens of their prompts and outputs, Z bans, A bans after a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from inference_service.engine.step import Row

ROWS_AT_ONCE = 32
"""Penalties take several tensors as large as the logits that they change."""
NEVER = float("-inf")


@dataclass(frozen=True)
class Edits:
    """A step's edits; int64 where not said otherwise. A row is an index into N, a place one into B."""

    grammar_G: Tensor
    """Rows."""
    allowed_GW: Tensor
    """int32: a bit a token id."""
    bias_at_L2: Tensor
    """Row, id."""
    bias_L: Tensor
    """float32."""
    penalized_P2: Tensor
    """Row, slot."""
    penalties_P3: Tensor
    """float32: repetition, frequency, presence."""
    counted_D: Tensor
    """Slots whose last token is one that they have not counted."""
    started_H: Tensor
    """Slots that count from nothing: what the two that follow say."""
    prompt_I2: Tensor
    """Slot, id."""
    output_O2: Tensor
    """Slot, id."""
    restricted_B: Tensor
    """Rows."""
    banned_Z2: Tensor
    """Place, id."""
    after_A4: Tensor
    """Place, slot, the last token after which the ban holds, id."""

    def to(self, device: torch.device) -> Edits:
        return Edits(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def gather_edits(rows: list[Row], pin: bool = False) -> Edits | None:
    """The edits of the rows that sample, in the host's memory (`pin`: page-locked); None where there are none."""
    edited = [(place, row) for place, row in enumerate(rows) if not (row.known_plain or row.is_plain)]
    if not edited:
        return None
    masked = [(place, row.allowed) for place, row in edited if row.allowed]
    biased = [(place, token_id, bias) for place, row in edited for token_id, bias in row.sampling.logit_bias]
    penalized = [(place, row) for place, row in edited if row.sampling.has_penalties]
    started = [row for _, row in penalized if row.history]
    restricted = [(place, row) for place, row in edited if row.banned_ids or row.banned_after]
    if not (masked or biased or penalized or restricted):
        return None
    after = [(index, row.slot, *pair) for index, (_, row) in enumerate(restricted) if row.is_decode for pair in row.banned_after]

    def ints(values: Sequence[int | tuple[int, ...]], *columns: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, pin_memory=pin).reshape(len(values), *columns)

    def floats(values: Sequence[float | tuple[float, ...]], *columns: int) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, pin_memory=pin).reshape(len(values), *columns)

    def words(masks: list[bytes]) -> Tensor:
        values = np.frombuffer(b"".join(masks), np.int32).reshape(len(masks), len(masks[0]) // 4 if masks else 0)
        words_GW = torch.tensor(values)
        return words_GW.pin_memory() if pin and masks else words_GW

    how = [row.sampling for _, row in penalized]
    return Edits(
        grammar_G=ints([place for place, _ in masked]),
        allowed_GW=words([mask for _, mask in masked]),
        bias_at_L2=ints([(place, token_id) for place, token_id, _ in biased], 2),
        bias_L=floats([bias for _, _, bias in biased]),
        penalized_P2=ints([(place, row.slot) for place, row in penalized], 2),
        penalties_P3=floats([(each.repetition_penalty, each.frequency_penalty, each.presence_penalty) for each in how], 3),
        counted_D=ints([row.slot for _, row in penalized if not row.history]),
        started_H=ints([row.slot for row in started]),
        prompt_I2=ints([(row.slot, token_id) for row in started for token_id in row.history[: row.prompt_tokens]], 2),
        output_O2=ints([(row.slot, token_id) for row in started for token_id in row.history[row.prompt_tokens :]], 2),
        restricted_B=ints([place for place, _ in restricted]),
        banned_Z2=ints([(index, banned) for index, (_, row) in enumerate(restricted) for banned in _known_bans(row)], 2),
        after_A4=ints(after, 4),
    )


def _known_bans(row: Row) -> list[int]:
    """The ids that are banned whatever the device knows: a row that brings its tokens tells the last one itself."""
    return row.banned_ids + [banned for last, banned in row.banned_after if row.token_ids and row.token_ids[-1] == last]


class LogitEdits:
    """Applies edits, and keeps for each slot what its penalties count: from the first row with penalties on, as memory is not free."""

    def __init__(self, last_token_id_S: Tensor) -> None:
        """`last_token_id_S`: where the step before left each slot's last token."""
        self._last_token_id_S = last_token_id_S
        self._counts_SV: Tensor | None = None
        self._in_prompt_SV: Tensor | None = None

    def apply(self, logits_NV: Tensor, edits: Edits) -> Tensor:
        """The logits to draw from, those given being left as they are. In float32 where values change: a half would round them away."""
        edits = edits.to(logits_NV.device)
        changes = len(edits.bias_L) or len(edits.penalties_P3)
        logits_NV = logits_NV.to(torch.float32 if changes else logits_NV.dtype, copy=True)
        if len(edits.grammar_G):
            _mask(logits_NV, edits)
        if len(edits.bias_L):
            logits_NV[edits.bias_at_L2.unbind(1)] += edits.bias_L
        if len(edits.penalties_P3):
            self._penalize(logits_NV, edits)
        if len(edits.restricted_B):
            _ban(logits_NV, edits, self._last_token_id_S)
        return logits_NV

    def _penalize(self, logits_NV: Tensor, edits: Edits) -> None:
        counts_SV, in_prompt_SV = self._count(edits, logits_NV.shape[1])
        parts = [torch.split(each, ROWS_AT_ONCE) for each in (edits.penalized_P2, edits.penalties_P3)]
        for penalized_Q2, penalties_Q3 in zip(*parts, strict=True):
            row_Q, slot_Q = penalized_Q2.unbind(1)
            counts_QV, in_prompt_QV = counts_SV.index_select(0, slot_Q), in_prompt_SV.index_select(0, slot_Q)
            penalized_QV = penalize(logits_NV.index_select(0, row_Q), counts_QV, in_prompt_QV, penalties_Q3)
            logits_NV.index_copy_(0, row_Q, penalized_QV)

    def _count(self, edits: Edits, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Take the tokens in that have come since: counts_SV in the output (int32), and in_prompt_SV."""
        last_S = self._last_token_id_S
        if self._counts_SV is None or self._in_prompt_SV is None:
            self._counts_SV = last_S.new_zeros(len(last_S), vocabulary, dtype=torch.int32)
            self._in_prompt_SV = last_S.new_zeros(len(last_S), vocabulary, dtype=torch.bool)
        counts_SV, in_prompt_SV = self._counts_SV, self._in_prompt_SV
        if len(edits.started_H):
            counts_SV.index_fill_(0, edits.started_H, 0)
            in_prompt_SV.index_fill_(0, edits.started_H, False)
            in_prompt_SV.view(-1).index_fill_(0, _cells(edits.prompt_I2, vocabulary), True)
        lasts_D2 = torch.stack((edits.counted_D, last_S.index_select(0, edits.counted_D)), dim=1)
        cells = _cells(torch.cat((edits.output_O2, lasts_D2)), vocabulary)
        counts_SV.view(-1).index_add_(0, cells, torch.ones_like(cells, dtype=torch.int32))
        return counts_SV, in_prompt_SV


def penalize(logits_QV: Tensor, counts_QV: Tensor, in_prompt_QV: Tensor, penalties_Q3: Tensor) -> Tensor:
    """Repetition divides positive logits, and multiplies negative ones, of what occurred in prompt or output; then frequency is
    subtracted for each occurrence in the output, and presence once. As in CTRL (arXiv:1909.05858) and in OpenAI's API."""
    repetition_Q1, frequency_Q1, presence_Q1 = penalties_Q3.unsqueeze(2).unbind(1)
    occurred_QV = counts_QV > 0
    repeated_QV = torch.where(logits_QV > 0, logits_QV / repetition_Q1, logits_QV * repetition_Q1)
    logits_QV = torch.where(occurred_QV | in_prompt_QV, repeated_QV, logits_QV)
    return logits_QV - frequency_Q1 * counts_QV - presence_Q1 * occurred_QV


def _mask(logits_NV: Tensor, edits: Edits) -> None:
    """Leave the rows with a grammar what it allows."""
    bits_GW32 = edits.allowed_GW.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=logits_NV.device) & 1
    allowed_GV = bits_GW32.flatten(1)[:, : logits_NV.shape[1]] == 1
    logits_NV.index_copy_(0, edits.grammar_G, logits_NV.index_select(0, edits.grammar_G).masked_fill(~allowed_GV, NEVER))


def _ban(logits_NV: Tensor, edits: Edits, last_token_id_S: Tensor) -> None:
    """Take from the restricted rows what is banned. Where that would leave nothing, the row keeps what it had: something must be drawn,
    and that it break a ban is better than that it be nonsense."""
    logits_BV = logits_NV.index_select(0, edits.restricted_B)
    places, vocabulary = logits_BV.shape
    place_A, slot_A, last_A, id_A = edits.after_A4.unbind(1)
    # A ban that does not hold falls on a place that is not there.
    place_A = place_A.masked_fill(last_token_id_S.index_select(0, slot_A) != last_A, places)
    banned_Y2 = torch.cat((edits.banned_Z2, torch.stack((place_A, id_A), dim=1)))
    banned = torch.zeros((places + 1) * vocabulary, dtype=torch.bool, device=logits_NV.device)
    banned.index_fill_(0, _cells(banned_Y2, vocabulary), True)
    left_BV = logits_BV.masked_fill(banned.view(-1, vocabulary)[:places], NEVER)
    some_left_B1 = left_BV.amax(dim=1, keepdim=True) > NEVER
    logits_NV.index_copy_(0, edits.restricted_B, torch.where(some_left_B1, left_BV, logits_BV))


def _cells(pairs_X2: Tensor, columns: int) -> Tensor:
    """Indices into a matrix laid flat, of (row, column)."""
    row_X, column_X = pairs_X2.unbind(1)
    return row_X * columns + column_X
