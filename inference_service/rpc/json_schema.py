"""Which JSON schemas can be served: those whose every keyword the grammar compiler keeps to.

The compiler passes over what it does not know, and over much that stands beside `$ref`, `enum` and the like. An answer made by such a
schema would parse, and yet be invalid by it; so it is refused, with the place of the keyword.
"""

from __future__ import annotations

import json
import re
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
LEAST, MOST = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
CLASS = re.compile(r"\[(\\.|[^\]\\])*\]")
"""In a pattern; what would have to be escaped in a string is left out of it by the compiler."""
ESCAPED = re.compile(r'["\x00-\x1f]|\\([\\nrtfv0]|(x|u00)([01].|22|5[cC]))')
FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "json-pointer", "time", "uri", "uuid"])


def find_fault(text: str) -> str | None:
    """What is wrong with a schema, and where; None: it can be compiled, or its compiler says why not."""
    try:
        fault = next(_faults(json.loads(text), "#"), None)
    except json.JSONDecodeError as error:
        return f"line {error.lineno}, column {error.colno}: {error.msg}"
    except ValueError:
        return "has a number of too many digits"
    except RecursionError:
        return "is nested too deeply"
    # A name may hold half of a surrogate pair, which no message can.
    return fault and fault.encode("utf-8", "backslashreplace").decode()


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
        if "$ref" in schema and not f"{schema['$ref']}/".startswith("#/"):
            yield f"at {at}/$ref: must begin with #/, or be #"
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
    if "format" in schema and str(schema["format"]) not in FORMATS:
        yield f"at {at}/format: {schema['format']!r} is not supported; supported are {', '.join(sorted(FORMATS))}"
    if lengths := schema.keys() & {"minLength", "maxLength"}:
        yield from (f"at {at}/{key}: is not supported beside {min(lengths)}" for key in schema.keys() & {"format", "pattern"})
    if schema.keys() >= {"format", "pattern"}:
        yield f"at {at}/pattern: is not supported beside format"
    if "multipleOf" in schema and "number" in types:
        yield f"at {at}/multipleOf: is supported for integers alone"
    if "multipleOf" in schema and not (schema.keys() & LEAST and schema.keys() & MOST):
        yield f"at {at}/multipleOf: needs a minimum and a maximum beside it"
    if ESCAPED.search(CLASS.sub("", str(schema.get("pattern", "")))):
        yield f"at {at}/pattern: quotes, backslashes and control characters are not supported in it"
    if schema.keys() >= {"properties", "patternProperties"}:
        yield f"at {at}/patternProperties: is not supported beside properties"
    yield from _unkept_names(schema, at)
    if "propertyNames" in schema and schema.keys() & {"properties", "patternProperties"}:
        yield f"at {at}/propertyNames: is not supported beside properties"
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(required, list):
        yield f"at {at}/required: is not a list"
        return
    for name in required:
        if not (isinstance(properties, dict) and isinstance(name, str) and name in properties):
            yield f"at {at}/required: {name!r} is not among the properties"


def _unkept_names(schema: dict[str, Any], at: str) -> Iterator[str]:
    """Of objects whose names are not all given: the compiler neither knows which it has had, nor how to tell escaped ones apart."""
    names = schema.get("properties")
    if not (schema.keys() & {"patternProperties", "propertyNames"} or schema.get("additionalProperties", not names)):
        return
    if schema.get("minProperties") not in (None, 0, 1):
        yield f"at {at}/minProperties: is supported up to 1 where names are not all given"
    for name in names if isinstance(names, dict) else ():
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            yield f"at {at}/properties/{name}: characters that are escaped are not supported beside further names"


def _inner_faults(schema: dict[str, Any], at: str) -> Iterator[str]:
    for key in ("properties", "patternProperties", *DEFINITIONS):
        if isinstance(schema.get(key), dict):
            for name, inner in schema[key].items():
                yield from _faults(inner, f"{at}/{key}/{name}")
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list) and schema[key]:
            for place, inner in enumerate(schema[key]):
                yield from _faults(inner, f"{at}/{key}/{place}")
        elif key in schema and key != "prefixItems":
            yield f"at {at}/{key}: is not a list of schemas"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield f"at {at}/allOf: is supported with one schema in it"
    for key in ("items", "additionalProperties", "propertyNames"):
        if isinstance(schema.get(key), dict):
            yield from _faults(schema[key], f"{at}/{key}")
