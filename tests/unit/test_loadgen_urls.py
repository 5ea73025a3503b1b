"""What a target's URL says, and what is refused."""

from __future__ import annotations

import re

import pytest

from inference_service.config import Telemetry
from inference_service.telemetry.tracing import Tracing
from loadgen._target import Takes, TargetError
from loadgen._targets import make_target


@pytest.mark.parametrize(
    ("url", "takes"),
    [
        ("vllm+http://h:1/v1", Takes()),
        ("http://h:1/v1", Takes()),
        ("openai://h:1", Takes()),
        ("vllm+http://h:1/v1/chat/completions", Takes(token_ids=False, text=False, messages=True)),
        ("sglang+http://h:1/v1/chat/completions", Takes(token_ids=False, text=False, messages=True, answer_ids=False)),
        ("tgi+http://h:1", Takes(token_ids=False, exact=False, answer_ids=False)),
        ("lorax+http://h:1/v1/completions", Takes(token_ids=False, answer_ids=False)),
        ("llamacpp+http://h:1/v1", Takes(answer_ids=False)),
        ("grpc://h:1", Takes()),
        ("grpc://h:1/chat", Takes(token_ids=False, text=False, messages=True)),
        ("vllm+grpc://h:1", Takes()),
        ("trtllm+grpc://h:1", Takes(text=False)),
    ],
)
def test_a_url_names_the_server_the_protocol_and_the_api(url: str, takes: Takes) -> None:
    assert make_target(url, 1.0, Tracing(Telemetry(traces=False), "test")).takes == takes


@pytest.mark.parametrize(
    "url", ["h:1", "http://h:1", "ftp://h:1/v1", "ours+http://h:1/v1", "tgi+grpc://h:1", "grpc://h:1/v1", "grpc://", "vllm://h:1"]
)
def test_other_urls_are_refused_with_the_forms_there_are(url: str) -> None:
    with pytest.raises(TargetError, match=r"^target .*: write grpc://HOST:PORT\[/chat\], .*vllm,.*\+http://HOST:PORT/v1"):
        make_target(url, 1.0, Tracing(Telemetry(traces=False), "test"))


@pytest.mark.parametrize("url", ["http://h:x/v1", "http://h:65536/v1", "grpc://h:x", "grpc://h:65536", "http://[::1/v1"])
def test_a_port_or_host_that_is_none_is_refused_with_the_url(url: str) -> None:
    with pytest.raises(TargetError, match=rf"^target '{re.escape(url)}': "):
        make_target(url, 1.0, Tracing(Telemetry(traces=False), "test"))


def test_a_host_with_a_space_does_not_answer() -> None:
    with pytest.raises(TargetError, match=r"^target http://exa mple/v1 does not answer: "):
        make_target("http://exa mple/v1", 1.0, Tracing(Telemetry(traces=False), "test")).model()
