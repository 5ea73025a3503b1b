"""A step's inputs: packed on the host from a plan, then copied into fixed buffers on the device, whose addresses never change.

Shapes: T tokens, R rows, B decode rows, M pages of the longest row, N rows that sample, X of these that draw at random.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from inference_service.engine.step import Row, StepPlan
from inference_service.execution.edits import Edits, gather_edits
from inference_service.execution.logprobs import PromptRows, gather_prompt
from inference_service.kernels.attention import StepLayout
from inference_service.kernels.sampling import Draws

ALL = 1 << 31
"""As top_k: more than any vocabulary."""


@dataclass(frozen=True)
class StepTensors:
    """The tensors of a step; int64 where not said otherwise."""

    token_ids_T: Tensor
    """0 where a decode row's id is still to come from the device."""
    positions_T: Tensor
    row_T: Tensor
    contexts_R: Tensor
    slots_B: Tensor
    last_N: Tensor
    """The last token of each row that samples."""
    slots_N: Tensor
    random_X: Tensor
    filtered_F: Tensor
    top_k_X: Tensor
    seed_X: Tensor
    position_X: Tensor
    temperature_X: Tensor
    """float32, as the two that follow."""
    top_p_X: Tensor
    min_p_X: Tensor
    scored_Y: Tensor
    """The sampling rows that ask for log-probabilities."""


@dataclass(frozen=True)
class Step:
    """A step's tensors, and what the host knows of them and gives the shapes."""

    tensors: StepTensors
    pages_RM: Tensor
    decodes: int
    lengths: list[int]
    contexts: list[int]
    top_k_limit: int
    any_top_p: bool
    alternatives: list[int]
    """For each sampling row, the log-probabilities asked for beside the chosen one's; -1: none at all."""
    edits: Edits | None
    prompt: PromptRows | None

    @property
    def samples(self) -> int:
        return len(self.alternatives)

    @property
    def all_sample(self) -> bool:
        """Whether every token's logits are wanted, as in a step of decodes."""
        return self.samples == sum(self.lengths)

    def layout(self) -> StepLayout:
        tensors = self.tensors
        return StepLayout(self.decodes, self.lengths, self.contexts, tensors.positions_T, tensors.row_T, self.pages_RM, tensors.contexts_R)

    def draws(self) -> Draws:
        tensors = self.tensors
        return Draws(
            random_X=tensors.random_X,
            filtered_F=tensors.filtered_F,
            top_k_limit=self.top_k_limit,
            any_top_p=self.any_top_p,
            temperature_X=tensors.temperature_X,
            top_k_X=tensors.top_k_X,
            top_p_X=tensors.top_p_X,
            min_p_X=tensors.min_p_X,
            seed_X=tensors.seed_X,
            position_X=tensors.position_X,
        )


def pack(plan: StepPlan, page_size: int) -> Step:
    """Read everything out of a plan, which the scheduler may change as soon as this returns. Raises ValueError for an impossible row."""
    rows = plan.rows
    check_rows(rows, page_size)
    decodes = sum(row.is_decode for row in rows)
    sampling = [row for row in rows if row.samples]
    drawn = [(index, row) for index, row in enumerate(sampling) if row.sampling.temperature > 0]
    filters = [row.sampling for _, row in drawn]
    filtered = [index for index, draw in enumerate(filters) if draw.top_k or draw.top_p < 1 or draw.min_p > 0]
    lasts, first = [], 0
    for row in rows:
        first += row.length
        if row.samples:
            lasts.append(first - 1)
    tensors = StepTensors(
        token_ids_T=_ints([token for row in rows for token in row.token_ids or (0,)]),
        positions_T=_ints([position for row in rows for position in range(row.start, row.start + row.length)]),
        row_T=_ints([index for index, row in enumerate(rows) for _ in range(row.length)]),
        contexts_R=_ints([row.position for row in rows]),
        slots_B=_ints([row.slot for row in rows[:decodes]]),
        last_N=_ints(lasts),
        slots_N=_ints([row.slot for row in sampling]),
        random_X=_ints([index for index, _ in drawn]),
        filtered_F=_ints(filtered),
        top_k_X=_ints([draw.top_k or ALL for draw in filters]),
        seed_X=_ints([_signed(draw.seed) for draw in filters]),
        position_X=_ints([row.position for _, row in drawn]),
        temperature_X=_floats([draw.temperature for draw in filters]),
        top_p_X=_floats([draw.top_p for draw in filters]),
        min_p_X=_floats([draw.min_p for draw in filters]),
        scored_Y=_ints([index for index, row in enumerate(sampling) if row.logprobs >= 0]),
    )
    return Step(
        tensors,
        _page_table(rows, page_size),
        decodes,
        [row.length for row in rows],
        [row.position for row in rows],
        max([draw.top_k for draw in filters], default=0),
        any(filters[index].top_p < 1 for index in filtered),
        [row.logprobs for row in sampling],
        gather_edits(sampling),
        gather_prompt(rows),
    )


class InputBuffers:
    """The fixed memory on the device: the inputs of the step that runs, and each slot's last token."""

    def __init__(self, max_requests: int, max_step_tokens: int, max_pages: int, device: torch.device) -> None:
        sizes = {"T": max_step_tokens}
        floats = ("temperature_X", "top_p_X", "min_p_X")
        self._buffers = {
            field.name: torch.zeros(
                sizes.get(field.name[-1], max_requests), dtype=torch.float32 if field.name in floats else torch.int64, device=device
            )
            for field in fields(StepTensors)
        }
        self._pages_RM = torch.zeros(max_requests, max_pages, dtype=torch.int64, device=device)
        self.last_token_id_S = torch.zeros(max_requests, dtype=torch.int64, device=device)

    def fill(self, step: Step) -> Step:
        """Copy a packed step in, and give the step as views of the buffers. Decode rows take their ids from their slots."""
        tensors = {name: self._put(name, getattr(step.tensors, name)) for name in self._buffers}
        rows, pages = step.pages_RM.shape
        pages_RM = self._pages_RM[:rows, :pages]
        pages_RM.copy_(step.pages_RM, non_blocking=True)
        torch.index_select(self.last_token_id_S, 0, tensors["slots_B"], out=tensors["token_ids_T"][: step.decodes])
        return replace(step, tensors=StepTensors(**tensors), pages_RM=pages_RM)

    def _put(self, name: str, values: Tensor) -> Tensor:
        if len(values) > len(self._buffers[name]):
            raise ValueError(f"{name} holds {len(self._buffers[name])} values, and the step has {len(values)}")
        view = self._buffers[name][: len(values)]
        return view.copy_(values, non_blocking=True) if len(values) else view


def check_rows(rows: list[Row], page_size: int) -> None:
    """Raises ValueError for a row that is impossible, or stands where it must not."""
    prefills = False
    for row in rows:
        if row.token_ids:
            prefills = True
        elif prefills:
            raise ValueError(f"slot {row.slot}: decode rows must stand before prefill rows")
        if row.length != (len(row.token_ids) or 1):
            raise ValueError(f"slot {row.slot}: length {row.length} does not fit its {len(row.token_ids)} token ids")
        if row.start + row.length > len(row.pages) * page_size:
            raise ValueError(f"slot {row.slot}: {len(row.pages)} pages do not cover {row.position} tokens")


def _page_table(rows: list[Row], page_size: int) -> Tensor:
    counts = [-(-row.position // page_size) for row in rows]
    longest = max(counts)
    return _ints([row.pages[:count] + [0] * (longest - count) for row, count in zip(rows, counts, strict=True)])


def _ints(values: list[int] | list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _signed(seed: int) -> int:
    """The same 64 bits as int64."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
