"""From logits to tokens and their log-probabilities.

Shapes: N rows that sample, Y of these with log-probabilities, V vocabulary, K alternatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inference_service.execution.batch import Step
from inference_service.kernels.sampling import Sampling
from inference_service.messages import TokenLogprobs


def sample(logits_NV: Tensor, step: Step, sampling: Sampling) -> tuple[Tensor, list[Tensor]]:
    """Draw ids_N. Where rows ask for log-probabilities, also [chosen_Y, top_ids_YK, top_YK]: of the logits as the model gave them."""
    tensors = step.tensors
    scores_YV = None
    if len(tensors.scored_Y):
        scores_YV = torch.log_softmax(logits_NV.index_select(0, tensors.scored_Y), dim=-1, dtype=torch.float32)
    if len(tensors.banned_id_Z):
        logits_NV = logits_NV.index_put((tensors.banned_row_Z, tensors.banned_id_Z), logits_NV.new_tensor(float("-inf")))
    ids_N = sampling(logits_NV, step.draws())
    if scores_YV is None:
        return ids_N, []
    chosen_Y = scores_YV.gather(1, ids_N[tensors.scored_Y].unsqueeze(1)).squeeze(1)
    top_YK, top_ids_YK = scores_YV.topk(max(step.alternatives), dim=-1)
    return ids_N, [chosen_Y, top_ids_YK, top_YK]


def to_logprobs(step: Step, scores: list[Tensor]) -> list[TokenLogprobs | None]:
    """One entry a sampling row, from what `sample` gave."""
    if not scores:
        return [None] * step.samples
    rows = iter(zip(*(tensor.tolist() for tensor in scores), strict=True))
    entries: list[TokenLogprobs | None] = []
    for count in step.alternatives:
        if count < 0:
            entries.append(None)
            continue
        chosen, top_ids, top = next(rows)
        entries.append(TokenLogprobs(chosen, top_ids[:count], top[:count]))
    return entries
