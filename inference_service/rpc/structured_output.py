"""Structured output as a request asks for it: checked as far as can be without compiling, and put into one form."""

from __future__ import annotations

import json

from inference.v1 import generate_pb2
from inference_service.messages import Grammar
from inference_service.rpc.errors import invalid
from inference_service.rpc.json_schema import find_fault

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024


def read_grammar(asked: generate_pb2.StructuredOutput, end_ids: list[int], ignore_end: bool) -> Grammar:
    """Raises RpcError, which names the field. What only the compiler finds is found by the engine."""
    kind = asked.WhichOneof("constraint")
    if kind is None:
        raise invalid("structured_output", "one of json_schema, regex, grammar and choices is required")
    field = f"structured_output.{kind}"
    if not end_ids:
        raise invalid(field, "the model has no end-of-sequence token, by which an answer could end")
    text = json.dumps(list(asked.choices.values)) if kind == "choices" else str(getattr(asked, kind))
    if len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"at most {MAX_GRAMMAR_BYTES} bytes")
    if kind == "choices":
        _check_choices(list(asked.choices.values))
    elif not text:
        raise invalid(field, "is empty")
    if kind == "json_schema" and (fault := find_fault(text)):
        raise invalid(field, fault)
    return Grammar(kind, text, end_ids, ignore_end)


def _check_choices(values: list[str]) -> None:
    if not 0 < len(values) <= MAX_CHOICES:
        raise invalid("structured_output.choices.values", f"1 to {MAX_CHOICES} strings, not {len(values)}")
    for place, value in enumerate(values):
        if not value:
            raise invalid(f"structured_output.choices.values[{place}]", "is empty")
