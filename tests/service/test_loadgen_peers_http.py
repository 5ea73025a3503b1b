"""OpenAI's APIs as each peer speaks them: streams in the peers' own form, sent by a real HTTP server, read by the load generator's target.

The streams are files of streams/, each of which names its source. Errors and lost connections are scripted here.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from inference_service.config import Telemetry
from inference_service.telemetry.tracing import Tracing
from loadgen._openai_stream import settle
from loadgen._presets import PRESETS
from loadgen._target import ErrorClass, Message, Model, Observation, Request, TargetError
from loadgen._targets import make_target

STREAMS = Path(__file__).with_name("streams")
PAUSE_S = 0.02
IDS = Request(output_tokens=4, token_ids=[5, 6, 7], seed=9)
TEXT = Request(output_tokens=4, text="five six seven", seed=9)
CHAT = Request(output_tokens=4, messages=(Message("user", "five six seven"),), seed=9)


@dataclass
class Script:
    """What the server answers to the next POSTs, and what it was asked."""

    status: int = 200
    body: bytes = b""
    chunked: bool = True
    cut: bool = False
    """Close the connection in the middle of the body's framing."""
    models: dict[str, Any] = field(default_factory=lambda: {"data": [{"id": "m", "max_model_len": 64}]})
    seen: list[dict[str, Any]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    """Of the connections that POSTs came on."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def do_GET(self) -> None:
        body = json.dumps({**self.script.models, "path": self.path}).encode()
        self.script.seen.append({"path": self.path})
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        script = self.script
        script.ports.append(self.client_address[1])
        script.seen.append({"path": self.path, **json.loads(self.rfile.read(int(self.headers["Content-Length"])))})
        self.send_response(script.status)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header(*(("Transfer-Encoding", "chunked") if script.chunked else ("Connection", "close")))
        self.end_headers()
        for event in script.body.split(b"\n\n"):
            if event:
                self._write(event + b"\n\n")
                time.sleep(PAUSE_S)
        if script.chunked and not script.cut:
            self._write(b"")
        self.close_connection = script.cut or not script.chunked

    def _write(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if self.script.chunked else data)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        pass


Ask = Callable[..., Observation]


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Scripted", (Handler,), {"script": script}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(script: Script, address: str) -> Ask:
    """Send one request to the scripted server, by a target with the scheme and path given."""

    def ask(request: Request = IDS, scheme: str = "vllm+http", path: str = "/v1") -> Observation:
        target = make_target(f"{scheme}://{address}{path}", 20.0, Tracing(Telemetry(traces=False), "test"))
        target.model()
        observation = Observation()
        target.generate(request, observation)
        target.close()
        return observation

    return ask


def events(*chunks: dict[str, Any] | str) -> bytes:
    return b"".join(f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode() for chunk in chunks)


def text(text: str = "", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None, **fields}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def usage(completion_tokens: int = 4, prompt_tokens: int = 3) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}}


@pytest.mark.parametrize(
    ("stream", "tokens", "answer", "ids", "cached"),
    [
        ("vllm-completions-recorded", [1, 1, 1, 1], " a classic example of", [253, 8170, 1183, 282], 0),
        ("vllm-completions", [1, 1, 2], " Theé sky", [378, 226, 102, 6376], 2),
        ("vllm-chat-recorded", [1, 1, 1, 1], "Hello! How can", [19556, 17, 1073, 416], 0),
        ("vllm-chat", [1, 1, 2], "Blue.", [40, 41, 42, 43], 0),
        ("trtllm-completions", [1, 2, 1], " The sky is blue", [], 0),
        ("trtllm-chat", [1, 2, 1], "Blue.", [], 0),
        ("sglang-completions", [1, 2, 1], " The sky is blue", [378, 6376, 314, 4461], 1),
        # One step's tokens came as reasoning and answer, in two chunks with the same count.
        ("sglang-chat", [2, 2], "Blue sky", [], 0),
        ("lmdeploy-completions", [1, 2, 1], " The sky is blue", [378, 6376, 314, 4461], 0),
        ("lmdeploy-chat", [2, 1, 1], "Blue.", [40, 41, 42, 43], 0),
        # The second token has no text: it is told by the last chunk's usage.
        ("lorax-completions", [1, 1, 2], " The is blue", [], 0),
        ("lorax-chat", [1, 1, 1, 1], "The sky is blue", [], 0),
        ("llamacpp-completions-recorded", [1, 1, 1, 1], " a classic example of", [], 0),
        ("llamacpp-completions", [1, 1, 2], " Theé sky is", [], 1),
        ("llamacpp-chat-recorded", [1, 1, 1, 1], "Hello! How can", [], 0),
        ("llamacpp-chat", [1, 1, 2], "Blue.", [], 0),
        ("tgi-completions", [1, 1, 1, 1], " The sky is blue", [], 0),
        ("tgi-chat", [1, 1, 1, 1], "The sky is blue", [], 0),
    ],
)
def test_each_peers_stream_is_understood(
    script: Script, ask: Ask, stream: str, tokens: list[int], answer: str, ids: list[int], cached: int
) -> None:
    peer, api, *recorded = stream.split("-")
    preset = PRESETS[peer]
    script.body = (STREAMS / f"{stream}.sse").read_bytes()
    header = script.body.partition(b"\n")[0]
    assert header.startswith(b": ") and b"recorded" in header and (b"not recorded" in header) != bool(recorded)
    script.models |= {"model_id": "m", "max_total_tokens": 64}
    chat = api == "chat"
    request = CHAT if chat else IDS if preset.token_ids else TEXT
    began_ns = time.monotonic_ns()
    observation = ask(request, f"{peer}+http", "/v1/chat/completions" if chat else "")
    assert observation.failure is None and not observation.cut_off
    assert [count for _, count in observation.arrivals] == tokens
    assert "".join(observation.answer_text) == answer
    assert observation.answer_ids == ids
    assert (observation.input_tokens, observation.cached_tokens) == ((31 if recorded else 5) if chat else 3, cached)
    times = [began_ns, observation.sent_ns, *(received_ns for received_ns, _ in observation.arrivals), observation.ended_ns]
    assert times == sorted(times)

    probe, sent = script.seen
    assert probe["path"] == (preset.info or "/v1/models")
    assert sent["path"] == ("/v1/chat/completions" if chat else "/v1/completions")
    assert (sent["model"], sent["max_tokens"], sent["stream"], sent["temperature"], sent["seed"]) == ("m", 4, True, 0.0, 9)
    if preset.ignore_eos:
        assert sent[preset.ignore_eos] is True
    assert sent.get("messages" if chat else "prompt") == (
        [{"role": "user", "content": "five six seven"}] if chat else [5, 6, 7] if preset.token_ids else "five six seven"
    )


@pytest.mark.parametrize(
    ("peer", "off", "on"),
    [
        ("vllm", {"top_p": 1.0, "top_k": 0}, {"top_p": 0.9, "top_k": 5}),
        ("sglang", {"top_p": 1.0, "top_k": -1}, {"top_p": 0.9, "top_k": 5}),
        # They refuse a top-p of 1 and a top-k of 0.
        ("tgi", {}, {"top_p": 0.9, "top_k": 5}),
        ("lorax", {}, {"top_p": 0.9, "top_k": 5}),
    ],
)
def test_sampling_is_off_where_it_is_not_asked_for(script: Script, ask: Ask, peer: str, off: dict[str, Any], on: dict[str, Any]) -> None:
    script.models |= {"model_id": "m"}
    script.body = events(text("a b c d"), usage(), "[DONE]")
    ask(Request(output_tokens=4, text="x", exact=False), f"{peer}+http")
    ask(Request(output_tokens=4, text="x", exact=False, temperature=0.7, top_p=0.9, top_k=5), f"{peer}+http")
    plain, sampled = (sent for sent in script.seen if "prompt" in sent)
    assert {name: plain[name] for name in ("top_p", "top_k") if name in plain} == off
    assert {name: sampled[name] for name in ("top_p", "top_k")} == on
    assert sampled["temperature"] == 0.7
    assert not {"seed", "ignore_eos", "ignore_eos_token"} & plain.keys()


def test_only_a_chunk_with_tokens_is_the_first(script: Script, ask: Ask) -> None:
    script.body = events(
        delta(role="assistant", content=""), delta(content=""), delta(role="assistant"), delta(content="a"), usage(1), "[DONE]"
    )
    observation = ask(Request(output_tokens=1, messages=CHAT.messages), path="/v1/chat/completions")
    assert [count for _, count in observation.arrivals] == [1]
    assert observation.arrivals[0][0] - observation.sent_ns >= 3 * PAUSE_S * 1e9


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_output_but_not_part_of_the_answer(script: Script, ask: Ask, name: str) -> None:
    script.body = events(delta(**{name: "hm"}), delta(content="a"), usage(2), "[DONE]")
    observation = ask(Request(output_tokens=2, messages=CHAT.messages), path="/v1/chat/completions")
    assert [count for _, count in observation.arrivals] == [1, 1]
    assert observation.answer_text == ["a"]


def test_chunks_that_are_pieces_of_tokens_count_by_the_usage(script: Script, ask: Ask) -> None:
    script.body = events(text("a"), text("b"), text("c"), text("d"), text("e"), usage(4), "[DONE]")
    observation = ask(scheme="llamacpp+http")
    assert observation.failure is None
    assert [count for _, count in observation.arrivals] == [1, 1, 1, 1]


def test_the_last_message_stays_where_tokens_are_taken_away_and_takes_what_is_missing() -> None:
    pieces = Observation(arrivals=[(10, 1), (20, 1), (30, 1), (40, 1)])
    settle(pieces, 3)
    assert pieces.arrivals == [(10, 1), (20, 1), (40, 1)]
    settle(pieces, 5)
    assert pieces.arrivals == [(10, 1), (20, 1), (40, 3)]


@pytest.mark.parametrize(
    ("exact", "completion_tokens", "message"),
    [
        (True, 3, "3 tokens received, but 4 were asked for"),
        (False, 3, None),
        (False, 5, "5 tokens received, but 4 were asked for"),
    ],
)
def test_an_answer_may_be_shorter_only_where_its_length_is_not_exact(
    script: Script, ask: Ask, exact: bool, completion_tokens: int, message: str | None
) -> None:
    script.body = events(text("a", token_ids=[1] * completion_tokens), usage(completion_tokens), "[DONE]")
    failure = ask(Request(output_tokens=4, token_ids=[5, 6, 7], exact=exact)).failure
    assert (failure.message if failure else None) == message


FULL = [text("a", token_ids=[1, 2]), text("b", token_ids=[3, 4], finish_reason="length")]


@pytest.mark.parametrize(
    ("chunks", "chunked", "cut", "kind", "code"),
    [
        ([*FULL, usage(), "[DONE]"], True, False, None, ""),
        ([*FULL, usage()], True, False, None, ""),
        ([*FULL, usage()], False, False, None, ""),
        ([*FULL, usage(), "[DONE]"], False, False, None, ""),
        (FULL, True, False, ErrorClass.SERVER, "PROTOCOL"),
        (FULL[:1], False, False, ErrorClass.TRANSPORT, "CONNECTION_LOST"),
        (FULL[:1], True, True, ErrorClass.TRANSPORT, "IncompleteRead"),
        ([*FULL, "[DONE]"], True, False, ErrorClass.SERVER, "PROTOCOL"),
        (["{"], True, False, ErrorClass.SERVER, "PROTOCOL"),
        (['{"x":' + 10_000 * "["], True, False, ErrorClass.SERVER, "PROTOCOL"),
        ([*FULL, usage(1 << 63), "[DONE]"], True, False, ErrorClass.SERVER, "PROTOCOL"),
        ([*FULL, usage(-4), "[DONE]"], True, False, ErrorClass.SERVER, "PROTOCOL"),
    ],
)
def test_a_stream_that_is_cut_is_told_from_one_that_ended(
    script: Script, ask: Ask, chunks: list[Any], chunked: bool, cut: bool, kind: ErrorClass | None, code: str
) -> None:
    script.body, script.chunked, script.cut = events(*chunks), chunked, cut
    observation = ask()
    failure = observation.failure
    assert ((failure.kind, failure.code) if failure else (None, "")) == (kind, code)
    assert not observation.cut_off


@pytest.mark.parametrize(
    ("error", "kind", "code", "message"),
    [
        ({"error": {"message": "dead", "type": "InternalServerError", "code": 500}}, ErrorClass.SERVER, "HTTP 500", "dead"),  # vLLM
        ({"error": {"message": "full", "type": "x", "code": 429}}, ErrorClass.QUEUE_FULL, "HTTP 429", "full"),
        ({"error": {"object": "error", "message": "late", "code": 504}}, ErrorClass.DEADLINE, "HTTP 504", "late"),  # SGLang
        ({"error": {"message": "bad", "code": "invalid", "http_status_code": 422}}, ErrorClass.REQUEST, "HTTP 422", "bad"),  # TGI's chat
        ({"error": "overloaded", "error_type": "overloaded"}, ErrorClass.QUEUE_FULL, "HTTP 429", "overloaded"),  # TGI
        ({"error": "gone", "error_type": "generation"}, ErrorClass.SERVER, "HTTP 500", "gone"),  # TGI, LoRAX
        ({"object": "error", "message": "bare", "code": 400}, ErrorClass.REQUEST, "HTTP 400", "bare"),  # LMDeploy
    ],
)
def test_an_error_in_the_stream_is_the_requests(
    script: Script, ask: Ask, error: dict[str, Any], kind: ErrorClass, code: str, message: str
) -> None:
    script.body = events(text("a", token_ids=[1]), error, "[DONE]")
    observation = ask()
    assert observation.failure is not None
    assert (observation.failure.kind, observation.failure.code, observation.failure.message) == (kind, code, message)
    assert observation.output_tokens == 1


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (429, {"error": {"message": "full", "code": 429}}, ErrorClass.QUEUE_FULL, "full"),
        (429, {"error": "Model is overloaded", "error_type": "overloaded"}, ErrorClass.QUEUE_FULL, "Model is overloaded"),
        (422, {"error": "Input validation error"}, ErrorClass.REQUEST, "Input validation error"),
        (400, {"object": "error", "message": "too long", "code": 400}, ErrorClass.REQUEST, "too long"),
        (503, {"error": {"message": "Loading model", "code": 503}}, ErrorClass.TRANSPORT, "Loading model"),
        (500, "Internal Server Error", ErrorClass.SERVER, "Internal Server Error"),
        (404, {"detail": "Not Found"}, ErrorClass.REQUEST, '{"detail": "Not Found"}'),
        (200, {"error": {"message": "in a body", "code": 500}}, ErrorClass.SERVER, "the stream ended without [DONE]"),
    ],
)
def test_refusals_have_a_class_and_say_why(script: Script, ask: Ask, status: int, body: Any, kind: ErrorClass, message: str) -> None:
    script.status = status
    script.body = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    failure = ask().failure
    assert failure is not None
    assert (failure.kind, failure.message.strip()) == (kind, message)


@pytest.mark.parametrize(("reason", "kind", "code"), [("abort", ErrorClass.CANCELLED, "ABORTED"), ("error", ErrorClass.SERVER, "ERROR")])
def test_a_finish_reason_can_be_a_failure(script: Script, ask: Ask, reason: str, kind: ErrorClass, code: str) -> None:
    script.body = events(text("a", token_ids=[1], finish_reason=reason), usage(1), "[DONE]")
    failure = ask().failure
    assert failure is not None and (failure.kind, failure.code) == (kind, code)


def test_nobody_there_is_a_failure_of_the_transport_and_found_by_the_probe(address: str) -> None:
    with pytest.raises(TargetError, match="does not answer"):
        make_target("vllm+http://127.0.0.1:9", 5.0, Tracing(Telemetry(traces=False), "test")).model()
    observation = Observation()
    make_target("vllm+http://127.0.0.1:9", 5.0, Tracing(Telemetry(traces=False), "test")).generate(IDS, observation)
    assert observation.failure is not None and observation.failure.kind is ErrorClass.TRANSPORT


@pytest.mark.parametrize(("peer", "connections"), [("vllm", 1), ("llamacpp", 3)])
def test_a_connection_is_kept_for_the_next_request_unless_the_server_closes_it(
    script: Script, address: str, peer: str, connections: int
) -> None:
    script.body = events(*FULL, usage(), "[DONE]")
    target = make_target(f"{peer}+http://{address}", 20.0, Tracing(Telemetry(traces=False), "test"))
    for _ in range(3):
        observation = Observation()
        target.generate(IDS, observation)
        assert observation.failure is None
    target.close()
    assert len(set(script.ports)) == connections


def test_llamacpp_tells_its_vocabulary(script: Script, address: str) -> None:
    script.models = {"data": [{"id": "m.gguf", "meta": {"n_vocab": 49152, "n_ctx_train": 8192}}]}
    target = make_target(f"llamacpp+http://{address}", 5.0, Tracing(Telemetry(traces=False), "test"))
    assert target.model() == Model("m.gguf", 49152, 0, frozenset())
