"""A request's part of a step, with what its sampling asks of the executor there."""

from __future__ import annotations

from inference_service.engine.requests import Request
from inference_service.engine.step import Row


def make_row(request: Request, token_ids: list[int], length: int, samples: bool) -> Row:
    """The row of the next `length` tokens: those given, or for a decode the one that the device has."""
    submit = request.submit
    row = Row(request.slot, request.computed, length, token_ids, request.pages, samples, submit.sampling, submit.logprobs)
    if samples and request.length < request.min_length:
        row.banned_ids = submit.stop_token_ids
    if request.is_plain:
        row.known_plain = not row.banned_ids
        return row
    if samples and request.guide:
        row.allowed = request.guide.allowed
    if samples and request.bad_words:
        row.banned_ids = row.banned_ids + request.bad_words.ids
        row.banned_after = request.bad_words.pairs(request.tokens, request.length - 1)
    if samples and token_ids and submit.sampling.has_penalties:
        row.history, row.prompt_tokens = request.tokens, request.prompt_tokens
    if token_ids and request.scores_prompt:
        row.next_ids = submit.token_ids[row.start + 1 : row.position + 1]
        row.prompt_logprobs = submit.prompt_logprobs if row.next_ids else -1
    return row
