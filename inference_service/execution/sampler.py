"""From logits to tokens and their log-probabilities.

Shapes: N rows that sample, Y of these with log-probabilities, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from inference_service.engine.step import Row
from inference_service.execution.batch import Step
from inference_service.kernels.sampling import Sampling
from inference_service.messages import TokenLogprobs


def sample(logits_NV: Tensor, step: Step, sampling: Sampling) -> tuple[Tensor, list[Tensor]]:
    """Draw ids_N. Where rows ask for log-probabilities, also [chosen_Y, top_ids_YK, top_YK]: of the logits as the model gave them."""
    tensors = step.tensors
    wanted = _Wanted(tensors.scored_Y, max(step.alternatives, default=0), tensors.banned_row_Z, tensors.banned_id_Z)
    return _score(logits_NV, wanted, lambda allowed_NV: sampling(allowed_NV, step.draws()))


def sample_rows(logits_NV: Tensor, rows: list[Row], draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The same from the rows that sample, on a GPU and without waiting for it: the scores are on the host once the stream gets there."""
    bans = [(index, banned) for index, row in enumerate(rows) for banned in row.banned_ids]

    def upload(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(logits_NV.device, non_blocking=True)

    scored_Y = upload([index for index, row in enumerate(rows) if row.logprobs >= 0])
    banned_row_Z, banned_id_Z = upload([index for index, _ in bans]), upload([banned for _, banned in bans])
    ids_N, scores = _score(logits_NV, _Wanted(scored_Y, max(row.logprobs for row in rows), banned_row_Z, banned_id_Z), draw)
    return ids_N, [torch.empty(score.shape, dtype=score.dtype, pin_memory=True).copy_(score, non_blocking=True) for score in scores]


@dataclass(frozen=True)
class _Wanted:
    """Which rows want log-probabilities, with how many alternatives at most, and pairs of a row and an id that it must not draw."""

    scored_Y: Tensor
    alternatives: int
    banned_row_Z: Tensor
    banned_id_Z: Tensor


def _score(logits_NV: Tensor, wanted: _Wanted, draw: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Tensor]]:
    scores_YV = None
    if len(wanted.scored_Y):
        scores_YV = torch.log_softmax(logits_NV.index_select(0, wanted.scored_Y), dim=-1, dtype=torch.float32)
    if len(wanted.banned_id_Z):
        never = torch.full((), float("-inf"), dtype=logits_NV.dtype, device=logits_NV.device)
        logits_NV = logits_NV.index_put((wanted.banned_row_Z, wanted.banned_id_Z), never)
    ids_N = draw(logits_NV)
    if scores_YV is None:
        return ids_N, []
    chosen_Y = scores_YV.gather(1, ids_N[wanted.scored_Y].unsqueeze(1)).squeeze(1)
    top_YK, top_ids_YK = scores_YV.topk(wanted.alternatives, dim=-1)
    return ids_N, [chosen_Y, top_ids_YK, top_YK]


def to_logprobs(alternatives: list[int], scores: list[Tensor]) -> list[TokenLogprobs | None]:
    """One entry a sampling row, from what `sample` gave; `alternatives` is what each row asked for, -1 for nothing."""
    if not scores:
        return [None] * len(alternatives)
    rows = iter(zip(*(tensor.tolist() for tensor in scores), strict=True))
    entries: list[TokenLogprobs | None] = []
    for count in alternatives:
        if count < 0:
            entries.append(None)
            continue
        chosen, top_ids, top = next(rows)
        entries.append(TokenLogprobs(chosen, top_ids[:count], top[:count]))
    return entries
