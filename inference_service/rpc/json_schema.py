"""Which JSON schemas can be served: those whose every keyword the grammar compiler keeps to.

The compiler passes over what it does not know, and over much that stands beside `$ref`, `enum` and the like. An answer made by such a
schema would parse, and yet be invalid by it; so it is refused, with the place of the keyword.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

ANNOTATIONS = frozenset(
    [
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    ]
)
DEFINITIONS = ("$defs", "definitions")
ALONE = ("$ref", "allOf", "anyOf", "const", "enum", "oneOf")
"""Keywords beside which no other constraint is kept."""
TYPES = {
    "array": "items maxItems minItems prefixItems",
    "integer": "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf",
    "number": "exclusiveMaximum exclusiveMinimum maximum minimum",
    "object": "additionalProperties maxProperties minProperties patternProperties properties propertyNames required",
    "string": "format maxLength minLength pattern",
}
"""The keywords kept for each type."""
IMPLIED = {"items": "array", "prefixItems": "array", "properties": "object", "patternProperties": "object"}
"""Keywords that make up for a missing type."""
FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "time", "uri", "uuid"])


def find_fault(text: str) -> str | None:
    """What is wrong with a schema, and where; None: it can be compiled, or its compiler says why not."""
    try:
        return next(_faults(json.loads(text), "#"), None)
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        return "is nested too deeply"


def _faults(schema: Any, at: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"at {at}: a schema is an object, true or false"
        return
    constraints = [key for key in schema if key not in ANNOTATIONS and key not in DEFINITIONS and not key.startswith("x-")]
    alone = [key for key in constraints if key in ALONE]
    if alone:
        yield from (f"at {at}/{key}: is not supported beside {alone[0]}" for key in constraints if key != alone[0])
    else:
        yield from _unkept(schema, [key for key in constraints if key != "type"], at)
    yield from _inner_faults(schema, at)


def _unkept(schema: dict[str, Any], constraints: list[str], at: str) -> Iterator[str]:
    implied = [IMPLIED[key] for key in constraints if key in IMPLIED]
    types = schema.get("type", implied[0] if implied else [])
    types = types if isinstance(types, list) else [types]
    kept = " ".join(TYPES.get(str(each), "") for each in types).split()
    for key in constraints:
        if key not in kept:
            known = any(key in keywords.split() for keywords in TYPES.values())
            yield f"at {at}/{key}: " + ("needs a `type` that it applies to" if known else "is not supported")
    if "format" in schema and schema["format"] not in FORMATS:
        yield f"at {at}/format: {schema['format']!r} is not supported; supported are {', '.join(sorted(FORMATS))}"
    if lengths := schema.keys() & {"minLength", "maxLength"}:
        yield from (f"at {at}/{key}: is not supported beside {min(lengths)}" for key in schema.keys() & {"format", "pattern"})
    if schema.keys() >= {"format", "pattern"}:
        yield f"at {at}/pattern: is not supported beside format"
    if "multipleOf" in schema and "number" in types:
        yield f"at {at}/multipleOf: is supported for integers alone"
    if "propertyNames" in schema and schema.keys() & {"properties", "patternProperties"}:
        yield f"at {at}/propertyNames: is not supported beside properties"
    properties = schema.get("properties")
    for name in schema.get("required") or ():
        if not isinstance(properties, dict) or name not in properties:
            yield f"at {at}/required: {name!r} is not among the properties"


def _inner_faults(schema: dict[str, Any], at: str) -> Iterator[str]:
    for key in ("properties", "patternProperties", *DEFINITIONS):
        if isinstance(schema.get(key), dict):
            for name, inner in schema[key].items():
                yield from _faults(inner, f"{at}/{key}/{name}")
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            for place, inner in enumerate(schema[key]):
                yield from _faults(inner, f"{at}/{key}/{place}")
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield f"at {at}/allOf: is supported with one schema in it"
    for key in ("items", "additionalProperties", "propertyNames"):
        if isinstance(schema.get(key), dict):
            yield from _faults(schema[key], f"{at}/{key}")
