"""Which form the attention of an eager step with decodes and prefill chunks takes: split, or a fused one where that was measured faster.

Shapes as in `attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import log

import msgspec

from inference_service.kernels.attention import FusedAttention, StepLayout

FORMS = ("batch_pod", "pod")
"""The backends of `attention_mixed` that are chosen by measurement. BatchAttention is not: its plan waits for the device."""
MARGIN = 0.97
"""A fused form is faster below this share of the split form's time: what is nearer may be noise, and its plan keeps the host longer."""

Size = tuple[int, int, int]
"""Of a step: prefill tokens, decodes, and tokens of a decode's context."""


def split_name(decode: str, prefill: str) -> str:
    """What the split form is called, by its backends: triton+fa3 and the like."""
    return f"{decode}+{prefill}"


class FormTimes(msgspec.Struct, frozen=True):
    """How long a layer's attention takes in a step of some size, by form."""

    size: Size
    microseconds: dict[str, float]

    def faster(self, split: str, able: Collection[str]) -> list[str]:
        """The fused forms, of those that are `able`, that are faster than `split`; the fastest first."""
        limit = MARGIN * self.microseconds[split]
        return sorted((form for form in able if self.microseconds.get(form, limit) < limit), key=self.microseconds.__getitem__)

    def without(self, forms: Collection[str]) -> FormTimes:
        return FormTimes(self.size, {form: us for form, us in self.microseconds.items() if form not in forms})


def drop_missing(times: Sequence[FormTimes], is_there: Callable[[str], bool]) -> tuple[list[FormTimes], list[str]]:
    """The times without those of forms that are fastest somewhere and are not there; and those forms."""
    splits = [(each, name) for each in times for name in each.microseconds if name not in FORMS]
    chosen = {form for each, split in splits for form in each.faster(split, FORMS)}
    missing = sorted(form for form in chosen if not is_there(form))
    return [each.without(missing) for each in times], missing


class FormTable:
    """What was measured, for a split form and the fused forms that can run."""

    def __init__(self, times: Sequence[FormTimes], split: str, able: Collection[str]) -> None:
        self.split = split
        self._faster = {each.size: each.faster(split, able) for each in times if split in each.microseconds}
        self._logs = {size: [log(length) for length in size] for size in self._faster}
        self.forms = [form for form in able if any(form in faster for faster in self._faster.values())]
        """Those that are faster somewhere."""

    def find(self, prefill_tokens: int, decodes: int, context: float) -> list[str]:
        """The fused forms that were faster, the fastest first, at the measured size that is nearest by the ratios of all three."""
        wanted = log(prefill_tokens), log(decodes), log(context)
        nearest = min(self._logs.items(), key=lambda item: sum(abs(a - b) for a, b in zip(item[1], wanted, strict=True)))
        return self._faster[nearest[0]]

    def describe(self) -> str:
        """What it chooses, for people."""
        if not self._faster:
            return f"eager steps by {self.split}, beside which nothing was measured here"
        best = [faster[0] for faster in self._faster.values() if faster]
        if not best:
            return f"eager steps by {self.split}, measured fastest at all {len(self._faster)} sizes"
        counts = ", ".join(f"{form} at {best.count(form)}" for form in dict.fromkeys(best))
        return f"eager steps by the measured table: {counts} of {len(self._faster)} sizes, else {self.split}"


class FusedByTable(FusedAttention):
    """For each step the form that the table has for it; None where that is split."""

    def __init__(self, table: FormTable, forms: Mapping[str, FusedAttention]) -> None:
        self._table, self._forms = table, forms

    def forms(self) -> list[FusedAttention]:
        return list(self._forms.values())

    def choose(self, layout: StepLayout) -> FusedAttention | None:
        if not self.serves(layout):
            return None
        decodes, lengths = layout.decodes, layout.lengths[layout.decodes :]
        # A late chunk reads what is before it, too.
        before = [context for length, context in zip(lengths, layout.contexts[decodes:], strict=True) if context > length]
        faster = self._table.find(sum(lengths), decodes, max(sum(layout.contexts[:decodes]) / decodes, *before, 0))
        return next((self._forms[form] for form in faster if self._forms[form].serves(layout)), None)
