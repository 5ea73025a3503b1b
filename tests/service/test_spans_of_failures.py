"""A scripted run against a real OTLP receiver: however a request ends, its spans say so, each once and right in every field."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from inference.v1 import generate_pb2 as pb
from inference_service.telemetry import names
from tests.service.conftest import RunningServer, run_server
from tests.service.otlp_receiver import Receiver, attributes, run_receiver
from tests.service.test_generate import request
from tests.service.test_lifecycle import PACED, Consumer, error_of_server, eventually, load, started

FOREVER = 1500
SECRET = "xylophone"


def run_script(server: RunningServer) -> None:
    """A request for each way to end, named after it."""
    occupants = [started(server, request([100], FOREVER, request_id=f"cancelled decoding {n}")) for n in range(2)]
    # The first ones to wait: nothing that would foretell their time has been measured yet.
    expired = Consumer(server, request([100], FOREVER, request_id="expired waiting"), timeout=2.0)
    assert expired.result().code == grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: load(server).waiting == 0)
    waiting = [Consumer(server, request([100], FOREVER, request_id=f"{how} waiting")) for how in ("cancelled", "aborted")]
    eventually(lambda: load(server).waiting == 2)
    assert error_of_server(server, request([100], 1, request_id="refused")).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    waiting[0].call.cancel()
    with server.stub() as stub:
        assert stub.Abort(pb.AbortRequest(request_id="aborted waiting")).found
    assert waiting[1].result().reason == pb.FINISH_REASON_ABORTED
    for occupant in occupants:
        occupant.call.cancel()
    eventually(lambda: load(server).running == 0)
    assert Consumer(server, request([100], FOREVER, request_id="expired decoding"), timeout=4.0).result().ids
    unknown = error_of_server(server, pb.GenerateRequest(text="x", request_id="unknown", model=SECRET))
    assert unknown.code() == grpc.StatusCode.NOT_FOUND and SECRET in str(unknown), "to the client, an error quotes"
    wrong = pb.GenerateRequest(text="x", request_id="wrong", sampling=pb.SamplingParams(temperature=-1))
    assert error_of_server(server, wrong).code() == grpc.StatusCode.INVALID_ARGUMENT
    said = pb.GenerateRequest(text=f"{SECRET} {SECRET}", request_id="ok", stopping=pb.StopConditions(max_tokens=4))
    assert started(server, said).result().finished is not None
    lost = started(server, request([100], FOREVER, request_id="lost"))
    os.kill(server.engine_pid, signal.SIGKILL)
    assert lost.result().code == grpc.StatusCode.UNAVAILABLE


@dataclass(frozen=True)
class Expected:
    """What a request's spans must say."""

    code: grpc.StatusCode
    children: tuple[str, ...] = ()
    reasons: list[str] | None = None
    message: str = ""
    prompt_tokens: int = 0

    @property
    def first_token(self) -> bool:
        return names.DECODE_SPAN in self.children


WAITED, RAN = (names.QUEUE_SPAN,), (names.QUEUE_SPAN, names.PREFILL_SPAN, names.DECODE_SPAN)
C = grpc.StatusCode
EXPECTED = {
    "cancelled decoding 0": Expected(C.CANCELLED, RAN, ["cancelled"], "the client cancelled", 1),
    "cancelled decoding 1": Expected(C.CANCELLED, RAN, ["cancelled"], "the client cancelled", 1),
    "cancelled waiting": Expected(C.CANCELLED, WAITED, ["cancelled"], "the client cancelled", 1),
    "expired waiting": Expected(C.DEADLINE_EXCEEDED, WAITED, ["deadline"], "the call's deadline passed", 1),
    "expired decoding": Expected(C.DEADLINE_EXCEEDED, RAN, ["deadline"], "the call's deadline passed", 1),
    "aborted waiting": Expected(C.OK, WAITED, ["abort"], "", 1),
    "refused": Expected(C.RESOURCE_EXHAUSTED, message="answers are in flight"),
    "unknown": Expected(C.NOT_FOUND, message="UNKNOWN_MODEL: model"),
    "wrong": Expected(C.INVALID_ARGUMENT, message="INVALID_FIELD: sampling.temperature"),
    "ok": Expected(C.OK, RAN, ["length"], "", 5),
    "lost": Expected(C.UNAVAILABLE, RAN, ["error"], "the engine is lost", 1),
}


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    """What it got of the script, once the server has stopped."""
    directory = tmp_path_factory.mktemp("otlp")
    with run_receiver() as receiver:
        settings = (
            "batch.max_requests=2",
            "server.max_queue=2",
            "server.engine_restarts=0",
            f"telemetry.otlp_endpoint={receiver.endpoint}",
        )
        with run_server(directory, *PACED, *settings, "telemetry.log_format=json") as server:
            run_script(server)
            assert server.stop() == 0
        assert not (directory / "traces.jsonl").exists()
        yield receiver


def servers(receiver: Receiver) -> dict[str, Span]:
    """The server spans by the requests' names."""
    spans = [span for span in receiver.spans if span.kind == Span.SPAN_KIND_SERVER]
    found = {attributes(span)[names.REQUEST_ID]: span for span in spans}
    assert len(found) == len(spans), "a request has one server span"
    return found


def test_each_request_has_its_spans(receiver: Receiver) -> None:
    assert servers(receiver).keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_every_field(receiver: Receiver, name: str) -> None:
    expected, span = EXPECTED[name], servers(receiver)[name]
    told = attributes(span)
    number, _ = expected.code.value
    assert (told[names.RPC_STATUS], told[names.RPC_GRPC_STATUS]) == (expected.code.name, number)
    assert (told[names.RPC_SYSTEM], told[names.RPC_METHOD]) == ("grpc", names.GENERATE_SPAN) and span.name == names.GENERATE_SPAN
    assert told.get(names.ERROR_TYPE) == (None if expected.code is C.OK else expected.code.name)
    assert span.status.code == (0 if expected.code is C.OK else 2)
    assert expected.message in span.status.message and bool(expected.message) == bool(span.status.message)
    assert told.get(names.FINISH_REASONS) == expected.reasons
    assert told[names.INPUT_TOKENS] == told[names.PROMPT_TOKENS] == expected.prompt_tokens
    assert (told[names.OUTPUT_TOKENS] > 0) == expected.first_token == (names.TIME_TO_FIRST_TOKEN in told)
    assert [event.name for event in span.events] == [names.FIRST_TOKEN_EVENT] * expected.first_token
    assert 0 < span.start_time_unix_nano < span.end_time_unix_nano
    assert told[names.TIME_E2E] == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9)

    children = sorted(
        (child for child in receiver.spans if child.parent_span_id == span.span_id), key=lambda child: child.start_time_unix_nano
    )
    assert tuple(child.name for child in children) == expected.children
    ends = [span.start_time_unix_nano, *(child.end_time_unix_nano for child in children)]
    assert [child.start_time_unix_nano for child in children] == ends[: len(children)], "each begins where the one before it ends"
    assert ends == sorted(ends) and ends[-1] <= span.end_time_unix_nano
    assert {child.trace_id for child in children} <= {span.trace_id} and not any(child.status.code for child in children)


def test_no_span_lacks_its_end(receiver: Receiver) -> None:
    ids = {span.span_id for span in receiver.spans}
    assert len(ids) == len(receiver.spans)
    for span in receiver.spans:
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0
        assert not span.parent_span_id or span.parent_span_id in ids
    (point,) = receiver.metrics["inference.telemetry.open_spans"].gauge.data_points
    assert point.as_int == 0


def test_metrics_agree_with_the_spans(receiver: Receiver) -> None:
    def counts(metric: str) -> dict[str, int]:
        points = receiver.metrics[metric].sum.data_points
        return {point.attributes[0].value.string_value: point.as_int for point in points if point.as_int}

    assert counts("inference.requests") == Counter(expected.code.name for expected in EXPECTED.values())
    assert counts("inference.refusals") == {"QUEUE_FULL": 1, "UNKNOWN_MODEL": 1, "INVALID_FIELD": 1}
    durations = receiver.metrics["gen_ai.server.request.duration"].histogram.data_points
    assert sum(point.count for point in durations) == len(EXPECTED)
    (ttft,) = receiver.metrics["gen_ai.server.time_to_first_token"].histogram.data_points
    assert ttft.count == sum(expected.first_token for expected in EXPECTED.values())
    (losses,) = receiver.metrics["inference.engine.losses"].sum.data_points
    assert losses.as_int == 1


def test_the_start_is_a_trace_of_its_phases(receiver: Receiver) -> None:
    (start,) = [span for span in receiver.spans if span.name == names.START_SPAN]
    phases = sorted((span for span in receiver.spans if span.parent_span_id == start.span_id), key=lambda span: span.start_time_unix_nano)
    assert [phase.name for phase in phases] == ["imports", "tokenizer", "listen", "engine_process", "first_token"]
    assert not start.parent_span_id and not start.status.code
    begins = [phase.start_time_unix_nano for phase in phases]
    assert begins == [start.start_time_unix_nano, *(phase.end_time_unix_nano for phase in phases[:-1])]
    assert phases[-1].end_time_unix_nano == start.end_time_unix_nano


def test_nothing_that_was_said_is_in_it(receiver: Receiver) -> None:
    for sent in receiver.requests:
        assert SECRET.encode() not in sent.SerializeToString()
    assert not any(key in attributes(span) for span in receiver.spans for key in (names.INPUT_MESSAGES, names.OUTPUT_MESSAGES))


def test_an_id_that_is_refused_is_in_no_span(tmp_path: Path) -> None:
    with run_server(tmp_path, "model.load_format=echo") as server:
        for request_id in ("x" * 1_000_000, "x\nx"):
            refused = error_of_server(server, pb.GenerateRequest(text="x", request_id=request_id))
            assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert server.stop() == 0
    spans = [json.loads(line) for line in server.traces.read_text().splitlines()]
    ids = [span["attributes"][names.REQUEST_ID] for span in spans if span["kind"] == "SERVER"]
    assert len(ids) == 2 and all(len(each) == 32 and each.isalnum() for each in ids)


def test_what_was_said_is_recorded_where_it_is_wanted(tmp_path: Path) -> None:
    def messages(span: Any) -> Any:
        told = span["attributes"]
        return json.loads(told[names.INPUT_MESSAGES]), json.loads(told[names.OUTPUT_MESSAGES])

    with run_server(tmp_path, "model.load_format=echo", "telemetry.record_prompts=true") as server:
        with server.stub() as stub:
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=SECRET)])
            made = pb.GenerateRequest(chat=chat, request_id="chat", stopping=pb.StopConditions(max_tokens=7))
            text = "".join(event.delta.text for event in stub.Generate(made, timeout=30))
        with suppress(grpc.RpcError):
            error_of_server(server, pb.GenerateRequest(text=SECRET, request_id="wrong", sampling=pb.SamplingParams(temperature=-1)))
        assert server.stop() == 0
    spans = [json.loads(line) for line in server.traces.read_text().splitlines()]
    by_name = {span["attributes"].get(names.REQUEST_ID): span for span in spans if span["kind"] == "SERVER"}
    said, answered = messages(by_name["chat"])
    assert said == [{"role": "user", "parts": [{"type": "text", "content": SECRET}]}]
    assert answered == [{"role": "assistant", "parts": [{"type": "text", "content": text}], "finish_reason": "length"}]
    assert messages(by_name["wrong"]) == ([{"role": "user", "parts": [{"type": "text", "content": SECRET}]}], [])
