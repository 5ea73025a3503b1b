"""Which JSON schemas are served, and that their answers are valid: random walks through what the compiled grammar permits."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import numpy as np
import pytest

from inference_service.rpc.json_schema import FORMATS, TYPES, find_fault

PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3, None, {"x": [1]}]}, "minItems": 1, "maxItems": 3},
        "address": {"$ref": "#/$defs/address"},
        "score": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "required": ["name", "tags", "address"],
    "additionalProperties": False,
    "$defs": {"address": {"type": "object", "properties": {"zip": {"type": "string", "pattern": "[0-9]{5}"}}, "required": ["zip"]}},
}
SERVED: list[Any] = [
    PERSON,
    {"type": "boolean"},
    {"const": {"a": [1, "x"]}},
    {"type": ["integer", "null"]},
    {"type": "integer", "multipleOf": 7, "minimum": 10, "maximum": 60},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {
        "type": "object",
        "propertyNames": {"type": "string", "pattern": "[a-c]{1,2}"},
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}}, "minProperties": 1},
    *({"type": "string", "format": form} for form in sorted(FORMATS - {"duration", "json-pointer"})),
]


@pytest.mark.parametrize("schema", SERVED, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_of_served_schemas_are_valid(schema: Any) -> None:
    """A walk that draws at random from what is permitted, until the end is; ends are taken as soon as they are there."""
    import xgrammar

    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    info = xgrammar.TokenizerInfo(tokens, vocab_size=257, stop_token_ids=[256])
    assert find_fault(json.dumps(schema)) is None
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(json.dumps(schema), max_whitespace_cnt=2)
    for seed in range(8):
        text = _walk(xgrammar.GrammarMatcher(compiled), random.Random(seed))
        jsonschema.validate(json.loads(text), schema)


def _walk(matcher: Any, draw: random.Random) -> str:
    text = bytearray()
    while len(text) < 20_000:
        words = np.zeros((1, 9), np.int32)
        matcher.fill_next_token_bitmask(words)
        allowed = [token for token in range(257) if words[0, token // 32] >> (token % 32) & 1]
        if 256 in allowed:
            return text.decode()
        # Closing characters first, now and then: most walks would never come to an end.
        closing = [token for token in allowed if chr(token) in '"}]' and draw.random() < 0.5]
        token = draw.choice(closing or allowed)
        assert matcher.accept_token(token)
        text.append(token)
    raise AssertionError("the walk did not end")


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ('{"type": ', "line 1, column 10: Expecting value"),
        ('{\n "type" "string"}', "line 2, column 9: Expecting ':' delimiter"),
        ("[]", "at #: a schema is an object, true or false"),
        ('{"type": "array", "uniqueItems": true}', "at #/uniqueItems: is not supported"),
        ('{"properties": {"a": {"not": {}}}}', "at #/properties/a/not: is not supported"),
        ('{"$defs": {"x": {"if": {}}}}', "at #/$defs/x/if: is not supported"),
        ('{"typ": "string"}', "at #/typ: is not supported"),
        ('{"minimum": 3}', "at #/minimum: needs a `type` that it applies to"),
        ('{"type": "string", "minimum": 3}', "at #/minimum: needs a `type` that it applies to"),
        ('{"enum": [1], "type": "integer"}', "at #/type: is not supported beside enum"),
        ('{"$ref": "#/$defs/a", "minimum": 5}', "at #/minimum: is not supported beside $ref"),
        ('{"type": "object", "required": ["z"]}', "at #/required: 'z' is not among the properties"),
        ('{"items": {"type": "string", "pattern": "a", "maxLength": 3}}', "at #/items/pattern: is not supported beside maxLength"),
        ('{"type": "string", "format": "regex"}', "at #/format: 'regex' is not supported; supported are date, "),
        ('{"type": "number", "multipleOf": 0.1}', "at #/multipleOf: needs a `type` that it applies to"),
        ('{"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]}', "at #/allOf: is supported with one schema in it"),
        ('{"type": "integer", "multipleOf": 2, "minimum": 4}', "at #/multipleOf: needs a minimum and a maximum beside it"),
        (r'{"type": "string", "pattern": "a\"b"}', "at #/pattern: quotes, backslashes and control characters are not supported"),
        (r'{"type": "string", "pattern": "[\"]\\n"}', "at #/pattern: quotes, backslashes and control characters are not supported"),
        ('{"properties": {"a": {}}, "patternProperties": {"a": {}}}', "at #/patternProperties: is not supported beside properties"),
        ('{"type": "object", "minProperties": 2}', "at #/minProperties: is supported up to 1 where names are not all given"),
        (r'{"properties": {"\\": {}}, "additionalProperties": true}', "at #/properties/\\: characters that are escaped are not supported"),
        ('{"$ref": "https://example.org/a.json"}', "at #/$ref: must begin with #/, or be #"),
        ('{"items": {"anyOf": []}}', "at #/items/anyOf: is not a list of schemas"),
        ('{"type": "object", "required": 5}', "at #/required: is not a list"),
        ('{"properties": {"a": {}}, "required": [["a"]]}', "at #/required: ['a'] is not among the properties"),
        ('{"type": "string", "format": []}', "at #/format: [] is not supported"),
        ('{"properties": {"\\ud800": {"not": {}}}}', "at #/properties/\\ud800/not: is not supported"),
        ('{"const": ' + "1" * 5000 + "}", "has a number of too many digits"),
        ('{"items":' * 50_000 + "{}" + "}" * 50_000, "is nested too deeply"),
    ],
)
def test_a_schema_that_would_not_be_kept_is_refused_with_its_place(schema: str, fault: str) -> None:
    assert (find_fault(schema) or "").startswith(fault)


def test_every_keyword_of_the_tables_is_kept() -> None:
    """None of them may be one that the compiler takes and then ignores: each must be in a schema whose answers are validated above."""
    used = {key for schema in SERVED for key in _keys(schema)}
    loose = {"additionalProperties", "exclusiveMaximum", "exclusiveMinimum", "patternProperties"}
    assert {keyword for keywords in TYPES.values() for keyword in keywords.split()} - used <= loose


def _keys(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema).union(*map(_keys, schema.values()))
    return set().union(*map(_keys, schema)) if isinstance(schema, list) else set()
