"""The peers' gRPC services, served for real with known tokens by the stubs of smg-grpc-proto, as the load generator's targets."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import grpc
import pytest

from inference_service.config import Telemetry
from inference_service.telemetry.tracing import Tracing
from loadgen._peer_grpc_target import DIALECTS
from loadgen._target import ErrorClass, Model, Observation, Request, TargetError
from loadgen._targets import make_target

REQUEST = Request(output_tokens=4, token_ids=[5, 6, 7], temperature=0.5, top_p=0.9, top_k=8, seed=2**31 - 1)
ANSWER = [31, 32, 33, 34]
GAP_S = 0.02


class Service:
    """A servicer of one of the three services: sends ANSWER in the chunks scripted, and then what `complete` says."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.messages: Any = import_module(f"smg_grpc_proto.generated.{DIALECTS[peer].module}_pb2")
        self.chunks: list[list[int]] = [[], ANSWER[:1], ANSWER[1:]]
        self.complete: dict[str, Any] | None = {"finish_reason": "length", "completion_tokens": 4}
        self.complete_ids = ANSWER
        self.fail = grpc.StatusCode.OK
        self.hold = threading.Event()
        self.hold.set()
        self.ended = threading.Event()
        self.requests: list[Any] = []

    @property
    def seen(self) -> Any:
        """The request before."""
        return self.requests[-1]

    def GetModelInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.peer == "trtllm":
            return self.messages.GetModelInfoResponse(model_id="m", max_seq_len=64, vocab_size=50)
        return self.messages.GetModelInfoResponse(model_path="/models/m", max_context_length=64, vocab_size=50, eos_token_ids=[3])

    def Generate(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.requests.append(request)
        context.add_callback(self.ended.set)
        for token_ids in self.chunks:
            time.sleep(GAP_S)
            yield self.messages.GenerateResponse(chunk=self.messages.GenerateStreamChunk(token_ids=token_ids))
        self.hold.wait(20)
        if self.fail is not grpc.StatusCode.OK:
            context.abort(self.fail, "as scripted")
        if self.complete is not None:
            name = "output_token_ids" if self.peer == "trtllm" else "output_ids"
            counts = {"prompt_tokens": 3, "cached_tokens": 2, name: self.complete_ids, **self.complete}
            yield self.messages.GenerateResponse(complete=self.messages.GenerateComplete(**counts))

    def __getattr__(self, name: str) -> Any:
        """The methods that are not asked for, but must be there."""
        if name.startswith("_"):
            raise AttributeError(name)
        return None


Start = Callable[[str], tuple[Service, str]]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[grpc.Server] = []

    def start(peer: str) -> tuple[Service, str]:
        dialect, service = DIALECTS[peer], Service(peer)
        services = import_module(f"smg_grpc_proto.generated.{dialect.module}_pb2_grpc")
        server = grpc.server(ThreadPoolExecutor(4))
        getattr(services, f"add_{dialect.service}Servicer_to_server")(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return service, f"{peer}+grpc://127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(grace=0).wait()


def send(url: str, request: Request = REQUEST, timeout_s: float = 20.0) -> Observation:
    target = make_target(url, timeout_s, Tracing(Telemetry(traces=False), "test"))
    observation = Observation()
    target.generate(request, observation)
    target.close()
    return observation


@pytest.mark.parametrize("peer", DIALECTS)
def test_tokens_are_those_of_the_chunks(start: Start, peer: str) -> None:
    _, url = start(peer)
    observation = send(url)
    assert observation.failure is None and not observation.cut_off
    assert [tokens for _, tokens in observation.arrivals] == [1, 3]
    assert observation.answer_ids == ANSWER
    assert (observation.input_tokens, observation.cached_tokens) == (3, 2)
    # The first chunk has no tokens.
    assert observation.arrivals[0][0] - observation.sent_ns >= 2 * GAP_S * 1e9


@pytest.mark.parametrize("peer", DIALECTS)
@pytest.mark.parametrize("ids", [ANSWER, ANSWER[2:]])
def test_tokens_that_no_chunk_had_come_with_the_last_message(start: Start, peer: str, ids: list[int]) -> None:
    service, url = start(peer)
    service.chunks, service.complete_ids = [ANSWER[:2]], ids
    observation = send(url)
    assert observation.failure is None
    assert [tokens for _, tokens in observation.arrivals] == [2, 2]
    assert observation.answer_ids == ANSWER


def test_vllm_is_asked_for_the_same_work(start: Start) -> None:
    service, url = start("vllm")
    send(url)
    seen, sampling = service.seen, service.seen.sampling_params
    assert list(seen.tokenized.input_ids) == [5, 6, 7]
    assert seen.stream and seen.request_id
    assert (sampling.max_tokens, sampling.ignore_eos, sampling.seed, sampling.n) == (4, True, 2**31 - 1, 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == pytest.approx((0.5, 0.9, 8, 1.0))
    send(url, Request(output_tokens=4, text="five six"))
    assert service.seen.text == "five six"
    assert not service.seen.sampling_params.HasField("seed")


def test_sglang_is_asked_for_the_same_work(start: Start) -> None:
    service, url = start("sglang")
    send(url)
    seen, sampling = service.seen, service.seen.sampling_params
    assert list(seen.tokenized.input_ids) == [5, 6, 7]
    assert seen.stream and seen.request_id
    assert (sampling.max_new_tokens, sampling.ignore_eos, sampling.n) == (4, True, 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == pytest.approx((0.5, 0.9, 8, 1.0))
    send(url, Request(output_tokens=4, token_ids=[1], exact=False))
    assert (service.seen.sampling_params.top_k, service.seen.sampling_params.ignore_eos) == (-1, False)


def test_trtllm_is_asked_for_the_same_work(start: Start) -> None:
    service, url = start("trtllm")
    send(url)
    seen, sampling = service.seen, service.seen.sampling_config
    assert list(seen.tokenized.input_token_ids) == [5, 6, 7]
    assert seen.streaming and seen.request_id
    assert (seen.max_tokens, seen.ignore_eos, sampling.seed, sampling.beam_width) == (4, True, 2**31 - 1, 1)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == pytest.approx((0.5, 0.9, 8))


def test_the_model_is_the_one_served(start: Start) -> None:
    models = {}
    for peer in DIALECTS:
        target = make_target(start(peer)[1], 5.0, Tracing(Telemetry(traces=False), "test"))
        models[peer] = target.model()
        target.close()
    named = Model("/models/m", 50, 64, frozenset({3}))
    assert models == {"vllm": named, "sglang": named, "trtllm": Model("m", 50, 64, frozenset())}


@pytest.mark.parametrize(
    ("complete", "kind", "code"),
    [
        (None, ErrorClass.SERVER, "PROTOCOL"),
        ({"finish_reason": "length", "completion_tokens": 5}, ErrorClass.SERVER, "PROTOCOL"),
        ({"finish_reason": "abort", "completion_tokens": 4}, ErrorClass.CANCELLED, "ABORTED"),
        ({"finish_reason": "error", "completion_tokens": 4}, ErrorClass.SERVER, "ERROR"),
    ],
)
def test_a_bad_end_is_a_failure(start: Start, complete: dict[str, Any] | None, kind: ErrorClass, code: str) -> None:
    service, url = start("vllm")
    service.complete = complete
    failure = send(url).failure
    assert failure is not None and (failure.kind, failure.code) == (kind, code)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorClass.QUEUE_FULL),
        (grpc.StatusCode.UNAVAILABLE, ErrorClass.TRANSPORT),
        (grpc.StatusCode.INVALID_ARGUMENT, ErrorClass.REQUEST),
        (grpc.StatusCode.INTERNAL, ErrorClass.SERVER),
    ],
)
def test_a_status_is_a_failure_and_what_came_before_is_kept(start: Start, status: grpc.StatusCode, kind: ErrorClass) -> None:
    service, url = start("sglang")
    service.fail = status
    observation = send(url)
    assert observation.failure is not None
    assert (observation.failure.kind, observation.failure.code, observation.failure.message) == (kind, status.name, "as scripted")
    assert observation.output_tokens == 4


def test_the_deadline_ends_the_call_at_the_server_too(start: Start) -> None:
    service, url = start("vllm")
    service.hold.clear()
    observation = send(url, timeout_s=0.5)
    assert observation.failure is not None and observation.failure.kind is ErrorClass.DEADLINE
    assert service.ended.wait(20)
    service.hold.set()


def test_nobody_there_is_said_with_the_address() -> None:
    target = make_target("sglang+grpc://127.0.0.1:9", 5.0, Tracing(Telemetry(traces=False), "test"))
    with pytest.raises(TargetError, match=r"target sglang\+grpc://127\.0\.0\.1:9 does not answer: UNAVAILABLE"):
        target.model()
    target.close()


def test_without_the_stubs_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    for module in [name for name in sys.modules if name.startswith("smg_grpc_proto.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(TargetError, match=r"^target vllm\+grpc://h:1: .*smg-grpc-proto.*extra `loadgen`"):
        make_target("vllm+grpc://h:1", 5.0, Tracing(Telemetry(traces=False), "test"))
