"""What was said in a request, as span attributes. Made only where `telemetry.record_prompts` permits it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from inference_service.telemetry import names


def content_attributes(asked: Sequence[tuple[str, str]], answers: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    """The conventions' messages as JSON, of (role, text) pairs that were asked and (text, finish reason) pairs that were answered."""
    said = [{"role": role, "parts": _parts(text)} for role, text in asked]
    answered = [{"role": "assistant", "parts": _parts(text), "finish_reason": reason} for text, reason in answers]
    return {names.INPUT_MESSAGES: json.dumps(said), names.OUTPUT_MESSAGES: json.dumps(answered)}


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "content": text}]
