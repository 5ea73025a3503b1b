"""From logits to tokens and their log-probabilities.

Shapes: N rows that sample, Y of these with log-probabilities, V vocabulary, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inference_service.execution.edits import Edits, LogitEdits
from inference_service.execution.logprobs import pick_scores


def sample(
    logits_NV: Tensor,
    scored_Y: Tensor,
    alternatives: list[int],
    edits: Edits | None,
    editor: LogitEdits,
    draw: Callable[[Tensor], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """Draw ids_N, and for the rows `scored_Y` give [chosen_Y, top_ids_YK, top_YK]: log-probabilities of the logits as the model gave them.

    `alternatives` is what each row asked for, -1 for nothing. Nothing waits for the device.
    """
    scores_YV = torch.log_softmax(logits_NV.index_select(0, scored_Y), dim=-1, dtype=torch.float32) if len(scored_Y) else None
    ids_N = draw(logits_NV if edits is None else editor.apply(logits_NV, edits))
    if scores_YV is None:
        return ids_N, []
    return ids_N, pick_scores(scores_YV, ids_N.index_select(0, scored_Y), max(alternatives))
