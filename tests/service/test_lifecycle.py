"""What the server does when things end early or go wrong, with real processes and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from inference.v1 import generate_pb2 as pb
from inference.v1 import info_pb2
from inference.v1.inference_pb2_grpc import InferenceServiceStub
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import detail, error_of, request

API = "inference.v1.InferenceService"
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PACED = ("model.load_format=echo", "model.echo_step_ms=20", "cache.page_size=4")


def eventually(condition: Callable[[], bool], timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.02)


def asked(server: RunningServer, ask: Callable[[grpc.Channel], Any]) -> Any:
    """The answer of a short call. A connection that the kernel has given to a front end which ends is reset: then another one is asked."""
    for again in (True, True, True, False):
        try:
            with server.channel() as channel:
                return ask(channel)
        except grpc.RpcError as error:
            if not again or error.code() != grpc.StatusCode.UNAVAILABLE:
                raise
            time.sleep(0.1)
    raise AssertionError


def health(server: RunningServer, service: str) -> int:
    question = health_pb2.HealthCheckRequest(service=service)
    return int(asked(server, lambda channel: health_pb2_grpc.HealthStub(channel).Check(question, timeout=10)).status)


class Consumer(threading.Thread):
    """Reads a stream to its end in the background; `first` is set by its first delta."""

    def __init__(self, server: RunningServer, made: pb.GenerateRequest, timeout: float = 60) -> None:
        super().__init__(daemon=True)
        self.channel = server.channel()
        self.call = InferenceServiceStub(self.channel).Generate(made, timeout=timeout)
        self.first = threading.Event()
        self.ids: list[int] = []
        self.finished: pb.Finished | None = None
        self.error: grpc.RpcError | None = None
        self.start()

    def run(self) -> None:
        try:
            for event in self.call:
                if event.HasField("delta"):
                    self.ids += event.delta.token_ids
                    self.first.set()
                elif event.HasField("finished"):
                    self.finished = event.finished
        except grpc.RpcError as error:
            self.error = error
        self.first.set()

    @property
    def code(self) -> grpc.StatusCode | None:
        """The error's, if the stream ended with one."""
        return self.error.code() if self.error else None

    @property
    def reason(self) -> int:
        """The finish reason, 0 if there was none."""
        return self.finished.reason if self.finished else 0

    def result(self) -> Consumer:
        self.join(30)
        assert not self.is_alive(), "the stream did not end"
        self.channel.close()
        return self


def started(server: RunningServer, made: pb.GenerateRequest, timeout: float = 60) -> Consumer:
    consumer = Consumer(server, made, timeout)
    assert consumer.first.wait(30) and consumer.error is None, consumer.error
    return consumer


@pytest.fixture(scope="module")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ("batch.max_requests=2", "server.max_queue=2")
    with run_server(tmp_path_factory.mktemp("paced"), *PACED, *settings) as server:
        yield server


def load(server: RunningServer) -> Any:
    return asked(server, lambda channel: InferenceServiceStub(channel).GetLoad(info_pb2.GetLoadRequest(), timeout=10))


def test_a_client_that_vanishes_frees_its_pages(paced: RunningServer) -> None:
    consumer = started(paced, request(list(range(100, 141)), 1500))
    eventually(lambda: load(paced).pages_used > 10)
    consumer.call.cancel()
    eventually(lambda: load(paced).pages_used == 0)
    assert load(paced).running == load(paced).waiting == 0
    assert consumer.result().code == grpc.StatusCode.CANCELLED


def test_a_killed_client_frees_its_pages(paced: RunningServer) -> None:
    program = f"""
import grpc
from inference.v1 import generate_pb2 as pb, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel("{paced.address}"))
for _ in stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 9))): print("got", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline()
        assert load(paced).pages_used > 0
        client.kill()
        eventually(lambda: load(paced).pages_used == 0)


def test_a_full_queue_refuses_with_a_time_to_retry(paced: RunningServer) -> None:
    consumers = [started(paced, request([100], 1500)) for _ in range(2)]
    consumers += [Consumer(paced, request([100], 1500)) for _ in range(2)]
    eventually(lambda: load(paced).running == 2 and load(paced).waiting == 2)
    error = error_of_server(paced, request([100], 1))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    delay = detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
    assert delay > 0 and dict(trailers(error))["grpc-retry-pushback-ms"] == str(delay)
    assert health(paced, API) == SERVING, "a probe is answered however full the queue is"
    for consumer in consumers:
        consumer.call.cancel()
    eventually(lambda: load(paced).pages_used == 0)


def trailers(error: grpc.RpcError) -> Any:
    assert isinstance(error, grpc.Call)
    return error.trailing_metadata()


def error_of_server(server: RunningServer, made: pb.GenerateRequest, timeout: float = 30) -> grpc.RpcError:
    with server.stub() as stub:
        return error_of(stub, made, timeout)


def test_abort_ends_running_and_waiting_requests(paced: RunningServer) -> None:
    running = [started(paced, request([100], 1500, request_id=f"run-{n}")) for n in range(2)]
    waiting = Consumer(paced, request([100], 1500, request_id="wait"))
    eventually(lambda: load(paced).waiting == 1)
    with paced.stub() as stub:
        assert stub.Abort(pb.AbortRequest(request_id="wait")).found
        assert waiting.result().reason == pb.FINISH_REASON_ABORTED
        assert waiting.ids == []
        for n in range(2):
            assert stub.Abort(pb.AbortRequest(request_id=f"run-{n}")).found
        for consumer in running:
            finished = consumer.result().finished
            assert finished is not None and finished.reason == pb.FINISH_REASON_ABORTED
            assert finished.usage.completion_tokens == len(consumer.ids) > 0
        assert not stub.Abort(pb.AbortRequest(request_id="run-0")).found
    eventually(lambda: load(paced).pages_used == 0)


def test_deadlines_end_requests_in_the_queue_and_mid_decode(paced: RunningServer) -> None:
    decoding = [started(paced, request([100], 1500), timeout=1.5) for _ in range(2)]
    queued = Consumer(paced, request([100], 1500), timeout=0.7)
    assert queued.result().code == grpc.StatusCode.DEADLINE_EXCEEDED
    for consumer in decoding:
        assert consumer.result().code == grpc.StatusCode.DEADLINE_EXCEEDED
        assert consumer.ids
    eventually(lambda: load(paced).pages_used == 0 and load(paced).running == 0)


def test_an_id_in_flight_is_refused_and_can_be_used_again_later(paced: RunningServer) -> None:
    consumer = started(paced, request([100], 1500, request_id="same"))
    assert error_of_server(paced, request([100], 1, request_id="same")).code() == grpc.StatusCode.ALREADY_EXISTS
    consumer.call.cancel()
    eventually(lambda: load(paced).running == 0)
    assert started(paced, request([100], 1, request_id="same")).result().finished is not None


def test_reflection_alone_is_enough_to_call(paced: RunningServer) -> None:
    """As grpcurl does: no stubs, only what the server tells."""
    with grpc.insecure_channel(paced.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {API, "grpc.health.v1.Health"} <= set(database.get_services())
        method = DescriptorPool(database).FindServiceByName(API).methods_by_name["Generate"]
        ask, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        made = ask(text="Hello", stopping={"max_tokens": 3})
        call = channel.unary_stream(f"/{API}/Generate", ask.SerializeToString, answer.FromString)
        events: list[Any] = list(call(made, timeout=30))
        assert events[0].WhichOneof("event") == "accepted"
        assert events[-1].finished.usage.completion_tokens == 3


def test_a_killed_engine_ends_every_stream_and_health_says_so(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.engine_restarts=0") as server:
        assert health(server, "") == health(server, API) == SERVING
        statuses: list[int] = []
        with grpc.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=API), timeout=60)
            assert next(watch).status == SERVING
            consumers = [started(server, request([100], 1500)) for _ in range(3)]
            os.kill(server.engine_pid, signal.SIGKILL)
            for consumer in consumers:
                error = consumer.result().error
                assert error is not None and error.code() == grpc.StatusCode.UNAVAILABLE
                assert detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_LOST"
            statuses.append(next(watch).status)
            watch.cancel()
        assert statuses == [NOT_SERVING]
        assert health(server, "") == health(server, API) == NOT_SERVING
        assert load(server).running == load(server).pages_used == 0
        assert error_of_server(server, request([100], 1)).code() == grpc.StatusCode.UNAVAILABLE
        assert server.stop() == 0


def test_an_engine_that_hangs_is_lost(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.engine_timeout_s=2", "server.engine_restarts=0") as server:
        consumer = started(server, request([100], 1500))
        os.kill(server.engine_pid, signal.SIGSTOP)
        error = consumer.result().error
        assert error is not None and error.code() == grpc.StatusCode.UNAVAILABLE
        assert health(server, "") == NOT_SERVING
        assert server.stop() == 0


def test_a_slow_step_is_no_lost_engine(tmp_path: Path) -> None:
    with run_server(tmp_path, "model.load_format=echo", "model.echo_step_ms=4000", "server.engine_timeout_s=2.5") as server:
        assert started(server, request([100], 2)).result().finished is not None
        assert health(server, "") == SERVING


def test_a_long_text_does_not_stop_the_others(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED) as server, server.stub() as stub:
        consumer = started(server, request([100], 1500))
        long = Consumer(server, pb.GenerateRequest(text="a" * 3_000_000))
        before, answered = len(consumer.ids), 0
        while long.is_alive():
            stub.GetLoad(info_pb2.GetLoadRequest(), timeout=5)
            answered += 1
            time.sleep(0.05)
        assert long.code == grpc.StatusCode.INVALID_ARGUMENT and answered > 5
        assert len(consumer.ids) > before + 5
        consumer.call.cancel()


@pytest.mark.parametrize("by_call", [False, True])
def test_a_drain_lets_requests_finish_and_refuses_new_ones(tmp_path: Path, by_call: bool) -> None:
    with run_server(tmp_path, *PACED) as server:
        engine_pid = server.engine_pid
        consumer = started(server, request([100], 100))
        with grpc.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=API), timeout=60)
            assert next(watch).status == SERVING
            if by_call:
                with server.stub() as stub:
                    assert stub.Drain(info_pb2.DrainRequest()).in_flight == 1
            else:
                server.process.send_signal(signal.SIGTERM)
            assert next(watch).status == NOT_SERVING
            eventually(lambda: error_of_server(server, request([100], 1)).code() == grpc.StatusCode.UNAVAILABLE)
            assert load(server).draining and health(server, "") == SERVING
        finished = consumer.result().finished
        assert finished is not None and consumer.ids == list(range(101, 201))
        assert server.process.wait(30) == 0
        eventually(lambda: not Path(f"/proc/{engine_pid}").exists())


def test_a_drain_cuts_off_what_takes_too_long(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.drain_s=0.5") as server:
        consumer = started(server, request([100], 1500))
        assert server.stop() == 0
        error = consumer.result().error
        assert error is not None and error.code() == grpc.StatusCode.UNAVAILABLE
        assert detail(error, error_details_pb2.ErrorInfo).reason == "DRAINING"
        assert '"rpc.response.status_code":"UNAVAILABLE"' in server.traces.read_text()


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED) as server:
        consumer = started(server, request([100], 1500))
        server.process.send_signal(signal.SIGINT)
        eventually(lambda: load(server).draining)
        assert server.stop() == 0
        assert consumer.result().code == grpc.StatusCode.UNAVAILABLE


def test_a_front_end_that_was_paused_keeps_its_engine(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.engine_timeout_s=2") as server:
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(3.5)
        server.process.send_signal(signal.SIGCONT)
        time.sleep(1)
        assert started(server, request([100], 3)).result().finished is not None


def test_an_engine_ends_though_its_front_end_was_killed_during_the_start(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "inference_service.cli",
        "serve",
        "--set=server.port=0",
        f"--set=telemetry.trace_file={tmp_path}/t.jsonl",
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
    eventually(lambda: bool(children.read_text()), timeout=60)
    engine = Path(f"/proc/{children.read_text().split()[0]}")
    server.kill()
    server.wait()
    eventually(lambda: not engine.exists() or "zombie" in (engine / "status").read_text(), timeout=120)


def test_an_engine_whose_front_end_is_killed_ends(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED) as server:
        engine_pid = server.engine_pid
        server.process.kill()
        eventually(lambda: not Path(f"/proc/{engine_pid}").exists() or "zombie" in Path(f"/proc/{engine_pid}/status").read_text())


def test_a_stuck_reader_is_cut_off(tmp_path: Path) -> None:
    # A process that is stopped answers no pings either.
    settings = ("model.max_context=100000", "server.stuck_reader_s=1", "server.keepalive_s=1000")
    with run_server(tmp_path, "model.load_format=echo", *settings) as server:
        program = f"""
import grpc, os, signal
from inference.v1 import generate_pb2 as pb, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel("{server.address}"))
stopping = pb.StopConditions(ignore_eos=True)
made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100]), stopping=stopping, output=pb.OutputOptions(logprobs=1))
calls = [stub.Generate(made) for _ in range(4)]
for call in calls: next(call)
os.kill(os.getpid(), signal.SIGSTOP)
codes = set()
for call in calls:
    try:
        for _ in call: pass
    except grpc.RpcError: pass
    codes.add(call.code().name)
print(*codes)
"""
        client = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        try:
            eventually(lambda: "T (stopped)" in Path(f"/proc/{client.pid}/status").read_text())
            eventually(lambda: load(server).running + load(server).waiting == 0, timeout=90)
            assert started(server, request([100], 5)).result().finished is not None, "others are served meanwhile"
            client.send_signal(signal.SIGCONT)
            out, _ = client.communicate(timeout=60)
            assert out.split() == ["RESOURCE_EXHAUSTED"]
        finally:
            client.kill()


def test_a_taken_port_is_an_error_at_once(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED) as server:
        port = server.address.rpartition(":")[2]
        command = [sys.executable, "-m", "inference_service.cli", "serve", "--set=model.load_format=echo", f"--set=server.port={port}"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1 and f"server.port: cannot listen on 127.0.0.1:{port}" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_model_that_cannot_be_loaded_is_an_error_at_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "inference_service.cli", "serve", "--set=model.path=/no/such/model"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and "model.path" in run.stderr and "Traceback" not in run.stderr


def test_the_front_end_imports_no_torch() -> None:
    program = "import sys, inference_service.rpc.server; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_engine_imports_no_grpc_or_torch() -> None:
    program = "import sys, inference_service.engine.process; assert not {'torch', 'grpc', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
