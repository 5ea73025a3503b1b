"""Structured output through the whole service, with SmolLM2: what comes back parses, whatever else is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import grpc
import jsonschema  # type: ignore[import-untyped]
import pytest

from inference.v1 import generate_pb2 as pb
from inference.v1.inference_pb2_grpc import InferenceServiceStub
from tests.service.conftest import RunningServer, run_server

TIMEOUT_S = 120
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_server(tmp_path_factory.mktemp("structured"), "cache.page_size=16", "cache.pages=160", "device.threads=1") as server:
        yield server


@pytest.fixture
def stub(server: RunningServer) -> Iterator[InferenceServiceStub]:
    with server.stub() as stub:
        yield stub


def asked(constraint: pb.StructuredOutput, **sampling: float) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="user", content="Describe a person.")
    return pb.GenerateRequest(
        chat=pb.ChatPrompt(messages=[message]),
        structured_output=constraint,
        sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
        stopping=pb.StopConditions(max_tokens=200),
    )


def answers(stub: InferenceServiceStub, request: pb.GenerateRequest) -> list[tuple[str, pb.Finished]]:
    texts: dict[int, str] = {}
    ends: dict[int, pb.Finished] = {}
    for event in stub.Generate(request, timeout=TIMEOUT_S):
        if event.HasField("delta"):
            texts[event.delta.index] = texts.get(event.delta.index, "") + event.delta.text
        elif event.HasField("finished"):
            ends[event.finished.index] = event.finished
    return [(texts[index], ends[index]) for index in sorted(ends)]


@pytest.mark.parametrize("temperature", [0, 1, 3])
def test_a_json_schema(stub: InferenceServiceStub, temperature: float) -> None:
    """Several at a time, with choices, also at a temperature at which all else is noise."""
    request = asked(pb.StructuredOutput(json_schema=json.dumps(PERSON)), temperature=temperature, n=3, seed=1)
    for text, finished in answers(stub, request):
        assert finished.reason == pb.FINISH_REASON_STOP, text
        jsonschema.validate(json.loads(text), PERSON)


def test_a_regular_expression_and_an_end_that_needs_no_token(stub: InferenceServiceStub) -> None:
    request = asked(pb.StructuredOutput(regex=r"\d{3}-\d{4}"), temperature=1, seed=2)
    request.stopping.ignore_eos = True
    request.stopping.min_tokens = 150
    ((text, finished),) = answers(stub, request)
    assert re.fullmatch(r"\d{3}-\d{4}", text) and finished.reason == pb.FINISH_REASON_STOP


def test_a_grammar(stub: InferenceServiceStub) -> None:
    grammar = 'root ::= sum\nsum ::= digit " + " digit " = " digit digit?\ndigit ::= [0-9]'
    ((text, _),) = answers(stub, asked(pb.StructuredOutput(grammar=grammar), temperature=1, seed=3))
    assert re.fullmatch(r"\d \+ \d = \d\d?", text)


def test_an_empty_answer_is_accepted_before_it_ends(stub: InferenceServiceStub) -> None:
    events = list(stub.Generate(asked(pb.StructuredOutput(regex="a{0}"), n=3), timeout=TIMEOUT_S))
    assert [event.WhichOneof("event") for event in events] == ["accepted"] + 3 * ["finished"]
    assert {event.finished.reason for event in events[1:]} == {pb.FINISH_REASON_STOP}


def test_choices_beside_bias_penalties_and_log_probabilities(stub: InferenceServiceStub) -> None:
    choices = ['a "quoted"\nline', "été", "no"]
    request = asked(pb.StructuredOutput(choices=pb.Choices(values=choices)), temperature=1, seed=4, repetition_penalty=1.5, n=4)
    request.output.logprobs = 2
    assert {text for text, _ in answers(stub, request)} <= set(choices)


def test_beside_requests_without_a_grammar(stub: InferenceServiceStub) -> None:
    """More of them than there are pages for at once: some are preempted, and nothing is lost."""
    plain = pb.GenerateRequest(text="Once upon a time", stopping=pb.StopConditions(max_tokens=300, ignore_eos=True))
    others = [stub.Generate(plain, timeout=TIMEOUT_S) for _ in range(8)]
    guided = [asked(pb.StructuredOutput(json_schema=json.dumps(PERSON)), temperature=1, seed=seed) for seed in range(6)]
    streams = [stub.Generate(request, timeout=TIMEOUT_S) for request in guided]
    for stream in streams:
        text = "".join(event.delta.text for event in stream)
        jsonschema.validate(json.loads(text), PERSON)
    for other in others:
        assert list(other)[-1].finished.usage.completion_tokens == 300


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (pb.StructuredOutput(regex="a("), r"structured_output.regex: .*position 3"),
        (pb.StructuredOutput(grammar="root ::= x"), r"structured_output.grammar: .*line 1, column 10: Rule \"x\" is not defined"),
        (pb.StructuredOutput(json_schema='{"type": }'), r"structured_output.json_schema: line 1, column 10: Expecting value"),
        (pb.StructuredOutput(json_schema='{"type": "objec"}'), r"structured_output.json_schema: Unsupported type \"objec\""),
        (pb.StructuredOutput(json_schema='{"items": {"not": {}}}'), r"structured_output.json_schema: at #/items/not: is not supported"),
        (pb.StructuredOutput(choices=pb.Choices()), r"structured_output.choices.values: 1 to 1024 strings, not 0"),
        (pb.StructuredOutput(choices=pb.Choices(values=["a", ""])), r"structured_output.choices.values\[1\]: is empty"),
        (pb.StructuredOutput(json_schema='{"properties": {"%s": 5}}' % ("😀" * 10_000)), r"structured_output.json_schema: at #/prop"),
        (pb.StructuredOutput(regex="a" * 70_000), r"structured_output.regex: at most 65536 bytes"),
        (pb.StructuredOutput(), r"structured_output: one of json_schema, regex, grammar and choices is required"),
    ],
)
def test_a_bad_grammar_is_an_invalid_argument_with_its_position(
    stub: InferenceServiceStub, constraint: pb.StructuredOutput, message: str
) -> None:
    request = asked(constraint)
    request.structured_output.SetInParent()
    with pytest.raises(grpc.RpcError) as caught:
        answers(stub, request)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert re.match(message, caught.value.details() or "")


def test_nothing_is_left_behind(server: RunningServer, stub: InferenceServiceStub) -> None:
    """After a client that left, one whose deadline passed, and an engine whose grammar process was killed in the midst."""
    request = asked(pb.StructuredOutput(regex=".{2000}"), temperature=1)
    stream = stub.Generate(request, timeout=TIMEOUT_S)
    next(stream)
    stream.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        answers_before = stub.Generate(request, timeout=1.0)
        list(answers_before)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    ((text, _),) = answers(stub, asked(pb.StructuredOutput(choices=pb.Choices(values=["yes"]))))
    assert text == "yes"
