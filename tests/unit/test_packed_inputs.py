"""The packed inputs against the plain ones, as a slot's request changes, its pages grow and rows are padded."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from inference_service.engine.step import Row, StepPlan
from inference_service.execution.batch import pack
from inference_service.execution.packed_inputs import ALIGNMENT, Fields, PackedStep, Sizes, SlotTable, device_fields
from inference_service.messages import Sampling

PAGE_SIZE, SLOTS, MAX_PAGES = 4, 12, 20
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def fill(slots: SlotTable, rows: list[Row], sizes: Sizes | None = None) -> tuple[PackedStep, Fields]:
    sizes = sizes or slots.measure(rows)
    # What a step leaves unwritten must not look like the step before.
    block = np.full(sizes.bytes, 0xA5, np.uint8)
    step = slots.write(rows, sizes, block)
    return step, device_fields(torch.from_numpy(block), sizes)


def assert_same(rows: list[Row], step: PackedStep, fields: Fields) -> None:
    """Equal to `batch.pack`, whatever the dtypes."""
    expected = pack(StepPlan(rows), PAGE_SIZE)
    tensors, count, samples = expected.tensors, len(rows), expected.samples
    tokens = sum(expected.lengths)
    assert step.lengths_R.tolist() == expected.lengths and step.contexts_R.tolist() == expected.contexts
    assert fields.token_ids_T[: step.decodes].tolist() == [-1] * step.decodes
    assert fields.token_ids_T[step.decodes : tokens].tolist() == tensors.token_ids_T[step.decodes :].tolist()
    assert fields.slots_R[:count].tolist() == [row.slot for row in rows]
    for name, size in (("positions_T", tokens), ("row_T", tokens), ("contexts_R", count)):
        assert getattr(fields, name)[:size].tolist() == getattr(tensors, name).tolist(), name
    for name in ("last_N", "slots_N"):
        assert getattr(fields, name)[:samples].tolist() == getattr(tensors, name).tolist(), name
    for row, pages in enumerate(expected.pages_RM.tolist()):
        used = -(-rows[row].position // PAGE_SIZE)
        assert fields.pages_RM[row, :used].tolist() == pages[:used]
    random_N = [index for index, row in enumerate(row for row in rows if row.samples) if row.sampling.temperature > 0]
    assert fields.temperature_N[:samples].nonzero().flatten().tolist() == random_N == tensors.random_X.tolist()
    assert step.greedy == (not random_N)
    for name in ("seed", "position", "temperature", "top_p", "min_p"):
        assert getattr(fields, f"{name}_N")[random_N].tolist() == getattr(tensors, f"{name}_X").tolist(), name
    assert fields.top_k_N[random_N].tolist() == tensors.top_k_X.clamp(max=(1 << 31) - 1).tolist()


def random_sampling(rng: random.Random) -> Sampling:
    return Sampling(
        rng.choice([0.0, 0.7, 1.3]), rng.choice([0, 1, 40]), rng.choice([1.0, 0.9]), rng.choice([0.0, 0.1]), rng.getrandbits(64)
    )


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_steps_is_packed_as_the_plain_way_does(seed: int) -> None:
    rng = random.Random(seed)
    slots = SlotTable(SLOTS, MAX_PAGES, PAGE_SIZE)
    pages: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    sampling: dict[int, Sampling] = {}
    for _ in range(40):
        rows = []
        for slot in sorted(rng.sample(range(SLOTS), rng.randint(1, SLOTS)), key=lambda slot: slot not in pages):
            new = slot not in pages
            if new:
                pages[slot], starts[slot], sampling[slot] = [], rng.choice([0, 0, 5]), random_sampling(rng)
            length = rng.randint(1, 9) if new else 1
            while len(pages[slot]) * PAGE_SIZE < starts[slot] + length:
                pages[slot].append(rng.randrange(1000))
            ids = [rng.randrange(1, 300) for _ in range(length)] if new else []
            rows.append(Row(slot, starts[slot], length, ids, pages[slot], not new or rng.random() < 0.7, sampling[slot]))
            starts[slot] += length
        if rng.random() < 0.5:
            step, fields = fill(slots, rows)
        else:
            tokens = sum(row.length for row in rows) + rng.randint(0, 9)
            step, fields = fill(slots, rows, Sizes(tokens, SLOTS, SLOTS, slots.max_pages, mixed=True))
            assert_padding_is_inert(rows, fields)
        assert_same(rows, step, fields)
        assert step.decodes == sum(row.is_decode for row in rows)
        for slot in list(pages):
            if starts[slot] > (MAX_PAGES - 3) * PAGE_SIZE or rng.random() < 0.1:
                del pages[slot]
            elif rng.random() < 0.2:
                # Published: an equal page of the prefix cache takes the place of the request's own.
                pages[slot][rng.randrange(len(pages[slot]))] = rng.randrange(1000)


def assert_padding_is_inert(rows: list[Row], fields: Fields) -> None:
    """Whatever is left over writes nothing, draws into the padding slot, and looks up what exists."""
    tokens, samples = sum(row.length for row in rows), sum(row.samples for row in rows)
    assert (fields.positions_T[tokens:] < 0).all() and (fields.positions_T[:tokens] >= 0).all()
    assert (fields.slots_R[len(rows) :] == SLOTS).all() and (fields.slots_N[samples:] == SLOTS).all()
    assert not fields.last_N[samples:].any() and not fields.temperature_N[samples:].any()
    assert all(0 <= row < max(1, len(rows)) for row in fields.row_T.tolist())
    assert (fields.contexts_R > 0).all() and (fields.top_k_N != 0).all()


def test_padded_rows_are_twins_of_the_row_with_the_shortest_context() -> None:
    slots = SlotTable(SLOTS, MAX_PAGES, PAGE_SIZE)
    starts = {4: 6, 2: 5, 9: 7}
    rows = [Row(slot, start, 1, [], [slot, slot + 1], True, Sampling(0.5, 3, 0.9, 0.2, 7)) for slot, start in starts.items()]
    step, fields = fill(slots, rows, Sizes(8, 8, 8, MAX_PAGES))
    assert_same(rows, step, fields)
    assert_padding_is_inert(rows, fields)
    assert step.decodes == 3 and not step.greedy
    padded = slice(3, None)
    assert set(fields.token_ids_T.tolist()) == {-1} and set(fields.row_T[padded].tolist()) == {1}
    assert set(fields.positions_T[padded].tolist()) == {-1 - 5} and set(fields.contexts_R[padded].tolist()) == {6}
    assert all(pages == fields.pages_RM[1].tolist() for pages in fields.pages_RM[padded].tolist())


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_of_nothing_but_padding_writes_nothing_and_reads_one_slot(mixed: bool) -> None:
    step, fields = fill(SlotTable(SLOTS, MAX_PAGES, PAGE_SIZE), [], Sizes(16, 8, 8, MAX_PAGES, mixed))
    assert_padding_is_inert([], fields)
    assert step.greedy and set(fields.positions_T.tolist()) == {-1} and set(fields.contexts_R.tolist()) == {1}
    assert not fields.pages_RM.any() and not fields.token_ids_T.any() and not fields.row_T.any()


def test_padded_tokens_of_a_chunk_are_twins_of_its_first() -> None:
    rows = [Row(3, 4, 5, [11, 12, 13, 14, 15], [7, 8, 9], False, GREEDY)]
    step, fields = fill(SlotTable(SLOTS, MAX_PAGES, PAGE_SIZE), rows, Sizes(16, 12, 12, MAX_PAGES, mixed=True))
    assert_padding_is_inert(rows, fields)
    assert step.decodes == 0 and step.greedy
    assert fields.token_ids_T.tolist() == [11, 12, 13, 14, 15] + [11] * 11
    assert fields.positions_T.tolist() == [4, 5, 6, 7, 8] + [-5] * 11


def test_fields_are_aligned_and_do_not_overlap() -> None:
    for sizes in (Sizes(1, 1, 0, 1), Sizes(513, 7, 3, 33), Sizes(256, 256, 256, 640)):
        block = torch.zeros(sizes.bytes, dtype=torch.uint8)
        fields = device_fields(block, sizes)
        spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in vars(fields).values() if tensor.numel())
        assert all(first % ALIGNMENT == spans[0][0] % ALIGNMENT for first, _ in spans)
        assert all(first + size <= second for (first, size), (second, _) in pairwise(spans))
        assert spans[-1][0] + spans[-1][1] <= block.data_ptr() + sizes.bytes


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([Row(1, 0, 1, [5], [0], True, GREEDY), Row(0, 3, 1, [], [1], True, GREEDY)], "slot 0: decode rows must stand before"),
        ([Row(0, 4, 1, [], [1], True, GREEDY)], "slot 0: 1 pages do not cover 5 tokens"),
        ([Row(0, 0, 3, [1, 2], [1], True, GREEDY)], "slot 0: length 3 does not fit its 2 token ids"),
    ],
)
def test_an_impossible_row_is_refused(rows: list[Row], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SlotTable(SLOTS, MAX_PAGES, PAGE_SIZE).measure(rows)
