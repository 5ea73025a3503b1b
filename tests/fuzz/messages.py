"""Requests made from the proto descriptors, every field of them; and bytes that are no message at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import strategies as st

from inference.v1 import generate_pb2 as pb
from inference.v1 import inference_pb2

TIMEOUT_S = 120.0
SPOILT = 10
"""Inputs made of one message by changing its bytes."""
SOME_EVENTS = 4
"""Of a stream, after which it is cancelled: what comes then is no other than what came before."""
WORDS = [
    "",
    "a",
    "\x00",
    "\ufffd",
    "<|im_start|>",
    "<|im_end|>",
    "{{ messages.__class__ }}",
    "{% for _ in range(10**9) %}{% endfor %}",
    '{"type": "object", "properties": {"a": {"$ref": "#"}}}',
    '{"type": "array", "items": {"type": "string"}, "minItems": 3}',
    '{"$ref": "#"}',
    "[" * 3000,
    "(a*)*b",
    "[a-z]{1,3}",
    'root ::= "a" root | ""',
    "root ::= root",
    "user",
    "../../etc/passwd",
    "x" * 5000,
    "\U0001f600" * 200,
]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, math.inf, -math.inf, math.nan, 0.5, 2.0, 100.0, 0.01]
ALLOWED = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS", "PERMISSION_DENIED", "CANCELLED"}
"""INTERNAL and UNKNOWN are faults of the server's."""

STRUCTURED = pb.GenerateRequest(text="a", structured_output=pb.StructuredOutput(regex="a")).SerializeToString()

strings = st.one_of(st.sampled_from(WORDS), st.text(max_size=40))
floats = st.one_of(st.sampled_from(FLOATS), st.floats(width=32))


def integers(least: int, most: int) -> st.SearchStrategy[int]:
    edges = sorted({each for each in (least, -1, 0, 1, 2, 16, 17, 100, 2048, 49151, 49152, most - 1, most) if least <= each <= most})
    return st.one_of(st.sampled_from(edges), st.integers(least, most))


SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: floats,
    FieldDescriptor.CPPTYPE_FLOAT: floats,
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_STRING: strings,
}


@cache
def values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        return messages(field.message_type, depth - 1)
    return st.binary(max_size=40) if field.type == FieldDescriptor.TYPE_BYTES else SCALARS[field.cpp_type]


@cache
def messages(descriptor: Descriptor, depth: int = 5) -> st.SearchStrategy[Message]:
    """Messages of a type with some of its fields set, down to a depth."""
    fields = [field for field in descriptor.fields if depth > 0 or field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE]
    make = GetMessageClass(descriptor)
    if not fields:
        return st.builds(make)

    contents = st.lists(st.sampled_from(fields), max_size=5, unique=True).flatmap(
        lambda chosen: st.tuples(*(st.tuples(st.just(field), contents_of(field, depth)) for field in chosen))
    )

    def build(chosen: tuple[tuple[FieldDescriptor, Any], ...]) -> Message:
        made = make()
        for field, content in chosen:
            _set(made, field, content)
        return made

    return contents.map(build)


@cache
def contents_of(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """What `_set` puts into a field: a mapping, a list or a value."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (values(field.message_type.fields_by_name[name], depth) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=4)
    if field.is_repeated:
        return st.tuples(st.lists(values(field, depth), max_size=4), st.sampled_from([1, 1, 1, 1, 50])).map(lambda each: each[0] * each[1])
    return values(field, depth)


def _set(made: Message, field: FieldDescriptor, content: Any) -> None:
    into: Any = getattr(made, field.name)
    if isinstance(content, dict):
        for key, value in content.items():
            if isinstance(value, Message):
                into[key].CopyFrom(value)
            else:
                into[key] = value
    elif field.is_repeated:
        into.extend(content)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        into.CopyFrom(content)
        into.SetInParent()
    else:
        setattr(made, field.name, content)


METHODS = list(inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods)


@st.composite
def calls(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[str, bytes]:
    """A method and a request of its type. Half of the calls are Generate with a prompt, so that other fields are looked at, too."""
    if draw(st.booleans()):
        method = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name["Generate"]
        request: Any = draw(messages(method.input_type))
        request.ClearField("model")
        request.ClearField("adapter")
        request.token_ids.ids.extend(draw(st.lists(st.integers(0, 49151), min_size=1, max_size=8)))
    else:
        method = draw(st.sampled_from(METHODS))
        request = draw(messages(method.input_type))
    return method.name, request.SerializeToString()


@st.composite
def raw_calls(draw: Callable[[st.SearchStrategy[Any]], Any]) -> list[tuple[str, bytes]]:
    """Methods and bytes: any, or those of one message in which some were changed, doubled or left out."""
    name, body = draw(calls())
    random = Random(draw(st.integers(0, 2**32)))
    return [(name, _spoil(body, random)) for _ in range(SPOILT)]


def _spoil(body: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return random.randbytes(random.randrange(300))
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(body) + 1)
        body = body[:start] + random.choice([b"", random.randbytes(random.randint(1, 8)), body]) + body[start + random.randint(0, 8) :]
    return body


def call(channel: grpc.Channel, name: str, body: bytes) -> str:
    """Make a call and check how it ends. Gives the status code's name. Raises AssertionError for an end that no input may bring about."""
    method: Any = channel.unary_stream(f"/inference.v1.InferenceService/{name}")
    stream = method(body, timeout=TIMEOUT_S)
    try:
        for count, _ in enumerate(stream, 1):
            if count == SOME_EVENTS:
                stream.cancel()
                return "OK"
    except grpc.RpcError as error:
        code = error.code().name
        # The server may say at once that the deadline cannot be met; one that passes is a hang.
        told = code == "DEADLINE_EXCEEDED" and error.details() != "Deadline Exceeded"
        assert told or code in ALLOWED, f"{name} ended with {code}: {error.details()}"
        if code == "INVALID_ARGUMENT":
            assert _names_its_cause(error), f"{name}: INVALID_ARGUMENT without a field: {error.details()}"
        return code
    return "OK"


def _names_its_cause(error: grpc.RpcError) -> bool:
    """Whether the details name a field, or say that the request is no message at all."""
    assert isinstance(error, grpc.Call)
    status, info, bad = rpc_status.from_call(error), error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    for detail in status.details if status else []:
        detail.Unpack(info)
        detail.Unpack(bad)
    return info.reason == "MALFORMED_REQUEST" or any(violation.field for violation in bad.field_violations)
