"""Edits of logits by their definition, a row at a time: what the executors are held against."""

from __future__ import annotations

from inference_service.messages import Sampling

NEVER = float("-inf")


def edited(logits: list[float], how: Sampling, prompt: list[int], output: list[int], banned: set[int], allowed: set[int]) -> list[float]:
    """The logits that a token is drawn from."""
    biases = dict(how.logit_bias)
    edited = []
    for token, logit in enumerate(logits):
        count = output.count(token)
        logit = logit + biases.get(token, 0.0) if token in allowed else NEVER
        if count or token in prompt:
            logit = logit / how.repetition_penalty if logit > 0 else logit * how.repetition_penalty
        logit -= how.frequency_penalty * count
        logit -= how.presence_penalty * (count > 0)
        edited.append(logit)
    left = [NEVER if token in banned else logit for token, logit in enumerate(edited)]
    return left if max(left) > NEVER else edited


def banned_next(sequence: list[int], words: list[list[int]]) -> set[int]:
    """The ids that would complete one of the words."""
    return {word[-1] for word in words if len(word) == 1 or sequence[-len(word) + 1 :] == word[:-1]}
