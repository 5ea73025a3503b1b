"""Generate and its neighbours over gRPC, against the echo engine, whose every token is known in advance."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from inference.v1 import generate_pb2 as pb
from inference.v1 import info_pb2
from inference.v1.inference_pb2_grpc import InferenceServiceStub
from tests.service.conftest import RunningServer

VOCAB, CONTEXT = 49152, 2048


@pytest.fixture
def stub(echo_server: RunningServer) -> Iterator[InferenceServiceStub]:
    with echo_server.stub() as stub:
        yield stub


def request(ids: list[int], max_tokens: int | None = None, **fields: Any) -> pb.GenerateRequest:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **fields)
    if max_tokens is not None:
        made.stopping.max_tokens = max_tokens
    return made


def collect(stub: InferenceServiceStub, made: pb.GenerateRequest) -> tuple[pb.Accepted, list[pb.Delta], pb.Finished]:
    events = list(stub.Generate(made, timeout=30))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["accepted", *["delta"] * (len(kinds) - 2), "finished"]
    return events[0].accepted, [event.delta for event in events[1:-1]], events[-1].finished


def error_of(stub: InferenceServiceStub, made: pb.GenerateRequest, timeout: float = 30) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(made, timeout=timeout))
    return caught.value


def detail(error: grpc.RpcError, kind: type[Message]) -> Any:
    assert isinstance(error, grpc.Call)
    status = rpc_status.from_call(error)
    assert status is not None and status.code == error.code().value[0]
    for packed in status.details:
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    return None


def test_ids_text_usage_and_times(stub: InferenceServiceStub) -> None:
    before_ns = time.time_ns()
    accepted, deltas, finished = collect(stub, request([500, 600], 40, request_id="one", sampling=pb.SamplingParams(seed=2**64 - 1)))
    after_ns = time.time_ns()
    assert (accepted.request_id, accepted.prompt_tokens, accepted.cached_tokens, accepted.seed) == ("one", 2, 0, 2**64 - 1)
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert ids == list(range(601, 641))
    text = "".join(delta.text for delta in deltas)
    assert text == stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text
    assert finished.reason == pb.FINISH_REASON_LENGTH and not finished.HasField("matched_stop")
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 40)
    token_times = [at for delta in deltas for at in delta.token_times_unix_ns]
    timings = finished.timings
    in_order = [before_ns, timings.queued_unix_ns, timings.scheduled_unix_ns, timings.first_token_unix_ns, *token_times[1:], after_ns]
    assert len(token_times) == 40 and in_order == sorted(in_order)
    assert (token_times[0], token_times[-1]) == (timings.first_token_unix_ns, timings.last_token_unix_ns)


def test_a_second_time_the_prompt_is_cached(stub: InferenceServiceStub) -> None:
    prompt = list(range(3000, 3040))
    assert collect(stub, request(prompt, 3))[0].cached_tokens == 0
    accepted, _, finished = collect(stub, request(prompt, 3))
    assert accepted.cached_tokens == finished.usage.cached_tokens == 32


def test_stop_token_is_reported_and_not_sent(stub: InferenceServiceStub) -> None:
    stopping = pb.StopConditions(stop_token_ids=[1005], max_tokens=50)
    _, deltas, finished = collect(stub, request([1000], stopping=stopping))
    assert [i for delta in deltas for i in delta.token_ids] == [1001, 1002, 1003, 1004]
    assert (finished.reason, finished.stop_token_id, finished.usage.completion_tokens) == (pb.FINISH_REASON_STOP, 1005, 5)
    stopping.min_tokens = 5
    _, deltas, finished = collect(stub, request([1000], stopping=stopping))
    ids = [i for delta in deltas for i in delta.token_ids]
    assert ids == [1001, 1002, 1003, 1004, *range(1006, 1052)], "1005 is banned for 5 tokens, then never comes again"


def test_end_of_sequence_ends_unless_ignored(stub: InferenceServiceStub) -> None:
    (eos,) = stub.GetModelInfo(info_pb2.GetModelInfoRequest()).eos_token_ids
    _, deltas, finished = collect(stub, request([VOCAB - 2], 20))
    assert [i for delta in deltas for i in delta.token_ids] == [VOCAB - 1, *range(eos)]
    assert (finished.reason, finished.stop_token_id) == (pb.FINISH_REASON_STOP, eos)
    _, deltas, finished = collect(stub, request([VOCAB - 2], stopping=pb.StopConditions(max_tokens=20, ignore_eos=True)))
    assert len([i for delta in deltas for i in delta.token_ids]) == 20 and finished.reason == pb.FINISH_REASON_LENGTH


def test_stop_strings_never_leak(stub: InferenceServiceStub) -> None:
    ids = list(range(2001, 2041))
    whole = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text
    for begin in range(5, len(whole) - 12, 17):
        stop = whole[begin : begin + 9]
        at = whole.index(stop)
        _, deltas, finished = collect(stub, request([2000], stopping=pb.StopConditions(max_tokens=40, stop=[stop, "\x00never"])))
        assert "".join(delta.text for delta in deltas) == whole[:at]
        assert (finished.reason, finished.stop_string) == (pb.FINISH_REASON_STOP, stop)
        sent = [i for delta in deltas for i in delta.token_ids]
        assert sent == ids[: len(sent)]
        assert whole[:at].startswith(stub.Detokenize(pb.DetokenizeRequest(token_ids=sent)).text)


def test_logprobs_come_one_a_token(stub: InferenceServiceStub) -> None:
    _, deltas, _ = collect(stub, request([700], 5, output=pb.OutputOptions(logprobs=1)))
    for delta in deltas:
        assert [entry.chosen.token_id for entry in delta.logprobs] == list(delta.token_ids)
        assert all(entry.top[0].token_id == entry.chosen.token_id for entry in delta.logprobs)
    _, deltas, _ = collect(stub, request([700], 5))
    assert not any(delta.logprobs for delta in deltas)


def test_prompt_logprobs_come_with_accepted(stub: InferenceServiceStub) -> None:
    """Aligned with the prompt's tokens, and of all of them, though they take two steps, and the cache has them after the first time."""
    prompt = list(range(5000, 5000 + 1500))
    for _ in range(2):
        accepted, deltas, _ = collect(stub, request(prompt, 2, output=pb.OutputOptions(prompt_logprobs=1)))
        assert accepted.cached_tokens == 0
        assert len(accepted.prompt_logprobs) == len(prompt) and accepted.prompt_logprobs[0] == pb.TokenLogprobs()
        assert [entry.chosen.token_id for entry in accepted.prompt_logprobs[1:]] == prompt[1:]
        assert all(len(entry.top) == 1 for entry in accepted.prompt_logprobs[1:]) and not any(delta.logprobs for delta in deltas)
    accepted, _, _ = collect(stub, request(prompt, 2))
    assert not accepted.prompt_logprobs and accepted.cached_tokens > 0
    accepted, _, _ = collect(stub, request([5], 2, output=pb.OutputOptions(prompt_logprobs=1)))
    assert list(accepted.prompt_logprobs) == [pb.TokenLogprobs()]


def test_bad_words_are_banned_as_tokens(stub: InferenceServiceStub) -> None:
    """With a space before them or without, in one token or several, and also where the first of these are the prompt's."""
    texts = [stub.Detokenize(pb.DetokenizeRequest(token_ids=ids)).text for ids in ([1003], [1005, 1006], [1008, 1009])]
    assert texts == [" return", "ized dist", " progiron"]
    words = pb.SamplingParams(bad_words=["return", "ized dist", "progiron"])
    _, deltas, _ = collect(stub, request([1000], 8, sampling=words))
    assert [i for delta in deltas for i in delta.token_ids] == [1001, 1002, 1004, 1005, 1007, 1008, 1010, 1011]
    _, deltas, _ = collect(stub, request([1005], 1, sampling=words))
    assert list(deltas[0].token_ids) == [1007]


def test_absent_max_tokens_fills_the_context(stub: InferenceServiceStub) -> None:
    _, deltas, finished = collect(stub, request([10] * (CONTEXT - 7)))
    assert sum(len(delta.token_ids) for delta in deltas) == 7 and finished.reason == pb.FINISH_REASON_LENGTH


def test_chat_and_tokenize_agree(stub: InferenceServiceStub) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
    ids = list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids)
    made = pb.GenerateRequest(chat=chat, stopping=pb.StopConditions(max_tokens=1, ignore_eos=True))
    accepted, deltas, _ = collect(stub, made)
    assert accepted.prompt_tokens == len(ids) and list(deltas[0].token_ids) == [ids[-1] + 1]
    text = stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)).text
    assert "What is the capital of France?" in text and text.endswith("<|im_start|>assistant\n")


INVALID = [
    ("prompt", pb.GenerateRequest()),
    ("text", pb.GenerateRequest(text="")),
    ("token_ids", request([])),
    ("token_ids", request([5, VOCAB])),
    ("token_ids", request([5] * CONTEXT)),
    ("chat.messages", pb.GenerateRequest(chat=pb.ChatPrompt())),
    ("chat.messages[0].role", pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(content="x")]))),
    (
        "chat.continue_final_message",
        pb.GenerateRequest(
            chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")], continue_final_message=True, add_generation_prompt=True)
        ),
    ),
    (
        "chat.template_kwargs",
        pb.GenerateRequest(
            chat=pb.ChatPrompt(
                messages=[pb.ChatMessage(role="user")],
                template_kwargs=struct_pb2.Struct(fields={"x": struct_pb2.Value(number_value=float("nan"))}),
            )
        ),
    ),
    (
        "chat.template_kwargs",
        pb.GenerateRequest(
            chat=pb.ChatPrompt(
                messages=[pb.ChatMessage(role="user")],
                template_kwargs=struct_pb2.Struct(fields={"messages": struct_pb2.Value(string_value="x")}),
            )
        ),
    ),
    ("request_id", request([5], request_id="x" * 129)),
    ("request_id", request([5], request_id="tab\t")),
    ("sampling.temperature", request([5], sampling=pb.SamplingParams(temperature=-0.1))),
    ("sampling.temperature", request([5], sampling=pb.SamplingParams(temperature=float("nan")))),
    ("sampling.temperature", request([5], sampling=pb.SamplingParams(temperature=float("inf")))),
    ("sampling.top_p", request([5], sampling=pb.SamplingParams(top_p=0))),
    ("sampling.top_p", request([5], sampling=pb.SamplingParams(top_p=1.5))),
    ("sampling.min_p", request([5], sampling=pb.SamplingParams(min_p=-1))),
    ("sampling.repetition_penalty", request([5], sampling=pb.SamplingParams(repetition_penalty=0))),
    ("sampling.repetition_penalty", request([5], sampling=pb.SamplingParams(repetition_penalty=float("inf")))),
    ("sampling.frequency_penalty", request([5], sampling=pb.SamplingParams(frequency_penalty=2.1))),
    ("sampling.presence_penalty", request([5], sampling=pb.SamplingParams(presence_penalty=float("nan")))),
    ("sampling.logit_bias", request([5], sampling=pb.SamplingParams(logit_bias={VOCAB: 1.0}))),
    ("sampling.logit_bias", request([5], sampling=pb.SamplingParams(logit_bias={3: -100.5}))),
    ("sampling.logit_bias", request([5], sampling=pb.SamplingParams(logit_bias={3: float("nan")}))),
    ("sampling.logit_bias", request([5], sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0)))),
    ("sampling.bad_words", request([5], sampling=pb.SamplingParams(bad_words=["x"] * 129))),
    ("sampling.bad_words", request([5], sampling=pb.SamplingParams(bad_words=["x", ""]))),
    ("sampling.bad_words", request([5], sampling=pb.SamplingParams(bad_words=["x" * 129]))),
    ("sampling.n", request([5], sampling=pb.SamplingParams(n=0))),
    ("sampling.n", request([5], sampling=pb.SamplingParams(n=17))),
    ("cache_salt", request([5], cache_salt="x" * 129)),
    ("stopping.max_tokens", request([5], 0)),
    ("stopping.max_tokens", request([5], CONTEXT)),
    ("stopping.min_tokens", request([5], stopping=pb.StopConditions(max_tokens=3, min_tokens=4))),
    ("stopping.stop", request([5], stopping=pb.StopConditions(stop=[""]))),
    ("stopping.stop", request([5], stopping=pb.StopConditions(stop=["x"] * 17))),
    ("stopping.stop", request([5], stopping=pb.StopConditions(stop=["x" * 1025]))),
    ("stopping.stop_token_ids", request([5], stopping=pb.StopConditions(stop_token_ids=range(129)))),
    ("stopping.stop_token_ids", request([5], stopping=pb.StopConditions(stop_token_ids=[VOCAB]))),
    ("output.logprobs", request([5], output=pb.OutputOptions(logprobs=21))),
    ("structured_output", request([5], structured_output=pb.StructuredOutput())),
    ("structured_output.regex", request([5], structured_output=pb.StructuredOutput(regex=""))),
    ("output.prompt_logprobs", request([5], output=pb.OutputOptions(prompt_logprobs=21))),
]
NOT_FOUND = [("model", request([5], model="gpt-5")), ("adapter", request([5], adapter="x"))]


@pytest.mark.parametrize(
    ("code", "field", "made"),
    [
        *((grpc.StatusCode.INVALID_ARGUMENT, field, made) for field, made in INVALID),
        *((grpc.StatusCode.NOT_FOUND, field, made) for field, made in NOT_FOUND),
    ],
)
def test_bad_requests_name_the_field(stub: InferenceServiceStub, code: grpc.StatusCode, field: str, made: pb.GenerateRequest) -> None:
    error = error_of(stub, made)
    assert error.code() == code, error
    assert str(error.details()).startswith(f"{field}: ")
    violation = detail(error, error_details_pb2.BadRequest).field_violations[0]
    assert violation.field == field
    assert detail(error, error_details_pb2.ErrorInfo).domain == "inference.v1"


def test_neutral_values_are_accepted(stub: InferenceServiceStub) -> None:
    neutral = pb.SamplingParams(n=1, repetition_penalty=1, frequency_penalty=0, presence_penalty=0)
    assert collect(stub, request([5], 1, sampling=neutral, model="smollm2-135m-instruct"))


def test_detokenize_refuses_ids_outside_the_vocabulary(stub: InferenceServiceStub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Detokenize(pb.DetokenizeRequest(token_ids=[VOCAB]))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
