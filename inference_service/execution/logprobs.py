"""Log-probabilities of the distribution as the model gave it: of drawn tokens, and of a prompt's.

Shapes: T tokens, C hidden size, V vocabulary, Y rows, U tokens that a prompt's tokens follow, K alternatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from inference_service.engine.step import Row
from inference_service.messages import TokenLogprobs

TOKENS_AT_ONCE = 128
"""Of a prompt: their logits and log-probabilities take 8 bytes for each token of the vocabulary."""


@dataclass(frozen=True)
class PromptRows:
    """The rows of a step that want log-probabilities of prompt tokens."""

    counts: dict[int, int]
    """How many tokens, by the row's place in the plan."""
    alternatives: list[int]
    """For each token."""
    token_U: Tensor
    """int64: indices into T."""
    next_id_U: Tensor
    """int64."""


def gather_prompt(rows: list[Row], pin: bool = False) -> PromptRows | None:
    """What a plan's rows want, in the host's memory (`pin`: page-locked); None where they want nothing."""
    if all(row.known_plain or row.prompt_logprobs < 0 for row in rows):
        return None
    counts: dict[int, int] = {}
    alternatives: list[int] = []
    tokens: list[int] = []
    first = 0
    for place, row in enumerate(rows):
        if row.prompt_logprobs >= 0:
            counts[place] = len(row.next_ids)
            alternatives += [row.prompt_logprobs] * len(row.next_ids)
            tokens += range(first, first + len(row.next_ids))
        first += row.length
    next_ids = [token_id for place in counts for token_id in rows[place].next_ids]
    return PromptRows(counts, alternatives, *(torch.tensor(ids, dtype=torch.int64, pin_memory=pin) for ids in (tokens, next_ids)))


def score_prompt(hidden_TC: Tensor, logits: Callable[[Tensor], Tensor], rows: PromptRows) -> list[Tensor]:
    """[chosen_U, top_ids_UK, top_UK], from logits made a few at a time by `logits`, the model's head."""
    most = max(rows.alternatives, default=0)
    token_U, next_id_U = (ids.to(hidden_TC.device, non_blocking=True) for ids in (rows.token_U, rows.next_id_U))
    parts = []
    for token_Y, next_id_Y in zip(*(torch.split(ids, TOKENS_AT_ONCE) for ids in (token_U, next_id_U)), strict=True):
        logits_YV = logits(hidden_TC.index_select(0, token_Y))
        parts.append(pick_scores(torch.log_softmax(logits_YV, dim=-1, dtype=torch.float32), next_id_Y, most))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def pick_scores(scores_YV: Tensor, chosen_id_Y: Tensor, alternatives: int) -> list[Tensor]:
    """[chosen_Y, top_ids_YK, top_YK]."""
    top_YK, top_ids_YK = scores_YV.topk(alternatives, dim=-1)
    return [scores_YV.gather(1, chosen_id_Y.unsqueeze(1)).squeeze(1), top_ids_YK, top_YK]


def to_logprobs(alternatives: list[int], scores: list[Tensor]) -> list[TokenLogprobs | None]:
    """An entry for each of `alternatives`, which says how many were asked for: -1 is none, and has no row in the scores."""
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


def to_prompt_logprobs(rows: PromptRows | None, scores: list[Tensor]) -> dict[int, list[TokenLogprobs]]:
    """By the row's place in the plan, what `score_prompt` gave."""
    if rows is None:
        return {}
    entries = iter([entry for entry in to_logprobs(rows.alternatives, scores) if entry is not None])
    return {place: list(islice(entries, count)) for place, count in rows.counts.items()}
