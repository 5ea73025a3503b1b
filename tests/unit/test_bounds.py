"""The bounds on what a request may hold: each is refused with its field's name, one less is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from inference.v1 import generate_pb2 as pb
from inference_service.messages import Ready
from inference_service.models.synthetic_tokenizer import write_tokenizer
from inference_service.rpc.caller import CALLER, Caller
from inference_service.rpc.errors import RpcError
from inference_service.rpc.validation import RequestReader, count_choices
from inference_service.text.tokenizer import Tokenizer

VOCAB = 2000


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> RequestReader:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "eos_token_id": 0}))
    write_tokenizer(directory)
    (directory / "chat_template.jinja").write_text("{{ messages | length }}")
    ready = Ready("Echo", "none", 0, VOCAB, 4096, "none", "none", 16, 1000, [], 16)
    return RequestReader("model", Tokenizer.load(directory), ready, max_prompt_tokens=10)


def chat(count: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * count))


def variables(length: int) -> pb.GenerateRequest:
    made = chat(1)
    made.chat.template_kwargs["x"] = "a" * length
    return made


def with_ids(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), **fields)


def sampling(**fields: Any) -> pb.GenerateRequest:
    return with_ids(sampling=pb.SamplingParams(**fields))


def stopping(**fields: Any) -> pb.GenerateRequest:
    return with_ids(stopping=pb.StopConditions(**fields))


@pytest.mark.parametrize(
    ("make", "most", "field"),
    [
        (lambda n: pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * n)), 10, "token_ids"),
        (lambda n: pb.GenerateRequest(text="a" * n), 10, "text"),
        (chat, 4096, "chat.messages"),
        (variables, (64 << 10) - 20, "chat.template_kwargs"),
        (lambda n: with_ids(cache_salt="a" * n), 128, "cache_salt"),
        (lambda n: with_ids(request_id="a" * n), 128, "request_id"),
        (lambda n: sampling(n=n), 16, "sampling.n"),
        (lambda n: sampling(logit_bias=dict.fromkeys(range(n), 1.0)), 1024, "sampling.logit_bias"),
        (lambda n: sampling(bad_words=["a"] * n), 128, "sampling.bad_words"),
        (lambda n: sampling(bad_words=["a" * n]), 128, "sampling.bad_words"),
        (lambda n: stopping(stop=["a"] * n), 16, "stopping.stop"),
        (lambda n: stopping(stop=["a" * n]), 1024, "stopping.stop"),
        (lambda n: stopping(stop_token_ids=[1] * n), 128, "stopping.stop_token_ids"),
        (lambda n: with_ids(output=pb.OutputOptions(logprobs=n)), 20, "output.logprobs"),
        (lambda n: with_ids(structured_output=pb.StructuredOutput(regex="a" * n)), 64 << 10, "structured_output.regex"),
        (
            lambda n: with_ids(structured_output=pb.StructuredOutput(choices=pb.Choices(values=["a"] * n))),
            1024,
            "structured_output.choices.values",
        ),
    ],
)
def test_a_bound_is_kept_and_named(reader: RequestReader, make: Callable[[int], pb.GenerateRequest], most: int, field: str) -> None:
    read(reader, make(most))
    with pytest.raises(RpcError) as caught:
        read(reader, make(most + 21 if field == "chat.template_kwargs" else most + 1))
    assert (caught.value.code.name, caught.value.field) == ("INVALID_ARGUMENT", field)
    assert len(caught.value.message) < 400


def read(reader: RequestReader, request: pb.GenerateRequest) -> str:
    count_choices(request, 100)
    return reader.read(request, 1, 0, 0).cache_salt


def test_salts_of_different_callers_are_never_the_same(reader: RequestReader) -> None:
    salts = [read(reader, with_ids(cache_salt=salt)) for salt in ("", "a")]
    for name in ("a", "b"):
        token = CALLER.set(Caller(name, None))
        salts += [read(reader, with_ids(cache_salt=salt)) for salt in ("", "a", "b", "a ", "b a")]
        CALLER.reset(token)
    assert len(set(salts)) == len(salts) and salts[:2] == ["", "a"]
