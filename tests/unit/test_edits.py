"""Edits of logits: batched, over overlapped steps, against the definition and against `transformers`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inference_service.engine.bad_words import BadWords
from inference_service.engine.step import Row
from inference_service.execution.edits import LogitEdits, gather_edits
from inference_service.messages import Sampling
from tests.unit.edits_reference import NEVER, banned_next, edited

VOCAB, SLOTS = 40, 6
tokens = st.integers(0, VOCAB - 1)
samplings = st.builds(
    Sampling,
    temperature=st.just(0.0),
    top_k=st.just(0),
    top_p=st.just(1.0),
    min_p=st.just(0.0),
    seed=st.just(0),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 100.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -0.5, 3.0]), max_size=4).map(lambda bias: sorted(bias.items())),
)


def as_bits(ids: set[int]) -> bytes:
    """As Row.allowed has them."""
    return sum(1 << token for token in ids).to_bytes(-(-VOCAB // 32) * 4, "little")


@dataclass
class Sequence:
    """One request, and what it asks for in the step at hand."""

    slot: int
    how: Sampling
    prompt: list[int]
    output: list[int]
    banned: list[int] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    allowed: set[int] = field(default_factory=set)

    def row(self, first: bool) -> Row:
        ids = self.prompt + self.output
        row = Row(self.slot, len(ids) - 1, 1, ids[-1:] if first else [], [0], True, self.how)
        row.banned_ids, row.banned_after = self.banned, self.after
        row.allowed = as_bits(self.allowed) if self.allowed else b""
        if first:
            row.history, row.prompt_tokens = ids, len(self.prompt)
        return row

    def expected(self, logits: list[float]) -> list[float]:
        last = (self.prompt + self.output)[-1]
        banned = {*self.banned, *(banned for after, banned in self.after if after == last)}
        return edited(logits, self.how, self.prompt, self.output, banned, self.allowed or set(range(VOCAB)))


def apply(editor: LogitEdits, logits_NV: Tensor, rows: list[Row]) -> Tensor:
    edits = gather_edits(rows)
    return logits_NV if edits is None else editor.apply(logits_NV, edits)


@given(data=st.data(), count=st.integers(1, SLOTS), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_any_rows_in_any_batch_follow_the_definition(data: st.DataObject, count: int, seed: int) -> None:
    """Requests come to slots that others had, with outputs or without, and decode several steps; some leave on the way."""
    torch.manual_seed(seed)
    last_token_id_S = torch.zeros(SLOTS, dtype=torch.int64)
    editor = LogitEdits(last_token_id_S)
    running: dict[int, Sequence] = {}
    for _ in range(4):
        fresh = set()
        for slot in range(count):
            if slot not in running or data.draw(st.integers(0, 4)) == 0:
                prompt, output = data.draw(st.lists(tokens, min_size=1, max_size=8)), data.draw(st.lists(tokens, max_size=4))
                running[slot] = Sequence(slot, data.draw(samplings), prompt, output)
                fresh.add(slot)
            sequence = running[slot]
            sequence.banned = data.draw(st.one_of(st.lists(tokens, max_size=4), st.just(list(range(VOCAB)))))
            likely = st.sampled_from((sequence.prompt + sequence.output)[-3:])
            sequence.after = data.draw(st.lists(st.tuples(likely, tokens), max_size=5))
            sequence.allowed = data.draw(st.sets(tokens, max_size=5))
        # Steps have rows in any order but for decodes first.
        order = sorted(data.draw(st.permutations(range(count))), key=lambda slot: slot in fresh)
        logits_NV = 5 * torch.randn(count, VOCAB)
        before_NV = logits_NV.clone()
        edited_NV = apply(editor, logits_NV, [running[slot].row(slot in fresh) for slot in order])
        assert torch.equal(logits_NV, before_NV), "log-probabilities are of these"
        for place, slot in enumerate(order):
            expected_V = torch.tensor(running[slot].expected(logits_NV[place].tolist()))
            torch.testing.assert_close(edited_NV[place], expected_V, rtol=1e-5, atol=1e-4)
        for slot in order:
            token = data.draw(tokens)
            last_token_id_S[slot] = token
            running[slot].output.append(token)


def test_steps_without_edits_have_none() -> None:
    rows = [Row(0, 4, 1, [], [0], True, Sampling(1.0, 5, 0.9, 0.1, 3), logprobs=2), Row(1, 4, 1, [], [0], True, Sampling(0, 0, 1, 0, 0))]
    assert gather_edits(rows) is None
    assert [row.is_plain for row in rows] == [False, True]


def test_small_penalties_count_in_half_precision() -> None:
    """Near 30 a bfloat16 is a multiple of 0.125, and would lose what is subtracted here."""
    how = Sampling(0.0, 0, 1.0, 0.0, 0, frequency_penalty=0.05)
    row = Row(0, 3, 1, [7], [0], True, how, history=[1, 2, 7, 7], prompt_tokens=2)
    logits_NV = torch.full((1, VOCAB), 30.0, dtype=torch.bfloat16)
    edited_NV = apply(LogitEdits(torch.zeros(1, dtype=torch.int64)), logits_NV, [row])
    assert edited_NV[0, 7].item() == pytest.approx(29.9) and edited_NV[0, 2].item() == 30.0


def test_bans_that_leave_nothing_do_not_hold() -> None:
    """But a grammar does: of the three tokens that it allows the best is drawn."""
    row = Row(
        0, 3, 1, [7], [0], True, Sampling(0, 0, 1, 0, 0), banned_ids=[3, 4], banned_after=[(7, 5), (8, 6)], allowed=as_bits({3, 4, 5})
    )
    logits_NV = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    edited_NV = apply(LogitEdits(torch.zeros(1, dtype=torch.int64)), logits_NV, [row])
    assert {token for token in range(VOCAB) if edited_NV[0, token] > NEVER} == {3, 4, 5} and int(edited_NV.argmax()) == 5


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.15, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    torch.manual_seed(0)
    ids, logits_NV = torch.randint(0, VOCAB, (5, 30)), 4 * torch.randn(5, VOCAB)
    expected_NV = transformers.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits_NV.clone())
    how = Sampling(0.0, 0, 1.0, 0.0, 0, repetition_penalty=penalty)
    rows = [
        Row(slot, 29, 1, history[-1:], [0], True, how, history=history, prompt_tokens=6 * slot) for slot, history in enumerate(ids.tolist())
    ]
    assert torch.equal(apply(LogitEdits(torch.zeros(5, dtype=torch.int64)), logits_NV, rows), expected_NV)


@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=8, unique_by=tuple),
    sequence=st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_bad_words_ban_what_transformers_bans(words: list[list[int]], sequence: list[int]) -> None:
    """With the last token known to the device alone, and what follows it not there yet."""
    bad_words = BadWords(words)
    pairs = bad_words.pairs(sequence, len(sequence) - 1)
    assert pairs == bad_words.pairs(sequence[:-1], len(sequence) - 1), "the last token is not looked at"
    banned = {*bad_words.ids, *(banned for last, banned in pairs if last == sequence[-1])}
    assert banned == banned_next(sequence, words)
    processor: Any = transformers.NoBadWordsLogitsProcessor(bad_words_ids=words)
    scores = processor(torch.tensor([sequence]), torch.zeros(1, 3))
    assert {token for token in range(3) if scores[0, token] == NEVER} == banned
