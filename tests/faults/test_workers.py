"""Several front ends for one engine: what one does, and its death, seen from the others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from inference.v1 import generate_pb2 as pb
from inference.v1 import info_pb2
from inference_service.config import Server
from inference_service.rpc.supervisor import SuperviseError, reserve_ports
from tests.faults.leaks import Leaks, pid_of, processes
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import detail, request
from tests.service.test_lifecycle import API, NOT_SERVING, PACED, SERVING, Consumer, error_of_server, eventually, health, load, started

SERVE = ("-m", "tests.faults.serve_with", "inference_service.engine.process")
MANY = 12
"""Connections that are spread among two front ends, and all to one of them once in a few thousand times."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = (*PACED, "server.workers=2", "server.engine_timeout_s=3", "telemetry.metrics_port=0")
    with run_server(tmp_path_factory.mktemp("pair"), *settings, program=SERVE) as server:
        yield server


@pytest.fixture(scope="module")
def leaks(pair: RunningServer) -> Leaks:
    for _ in range(MANY):
        assert started(pair, request([100], 2)).result().ids == [101, 102]
        abort(pair, "nobody")
    return Leaks(pair)


def abort(server: RunningServer, request_id: str) -> bool:
    """By a connection of its own, and so by either front end."""
    with server.stub() as stub:
        return bool(stub.Abort(pb.AbortRequest(request_id=request_id), timeout=30).found)


def workers(server: RunningServer) -> list[int]:
    return [pid for pid, role in processes(server).items() if role == "worker"]


def kill_one(server: RunningServer) -> None:
    """A front end, until another one takes its place; before it is gone, the kernel still gives it connections."""
    victim = workers(server)[0]
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: len(workers(server)) == 2 and victim not in workers(server))


def test_a_killed_front_end_takes_only_its_own_streams(pair: RunningServer, leaks: Leaks) -> None:
    consumers = [started(pair, request([100 * n], 300)) for n in range(1, MANY + 1)]
    assert load(pair).running == MANY, "each front end knows of all"
    kill_one(pair)
    ended = [consumer.result() for consumer in consumers]
    codes = [consumer.code for consumer in ended]
    assert set(codes) == {None, grpc.StatusCode.UNAVAILABLE}
    for n, consumer in enumerate(ended, 1):
        if consumer.code is None:
            assert consumer.ids == list(range(100 * n + 1, 100 * n + 301))
    assert all(started(pair, request([100], 2)).result().ids == [101, 102] for _ in range(MANY))
    leaks.assert_back()


def test_requests_of_a_killed_front_end_end_with_it(pair: RunningServer, leaks: Leaks) -> None:
    consumers = [started(pair, request([100], 1500)) for _ in range(MANY)]
    kill_one(pair)
    eventually(lambda: 0 < load(pair).running < MANY)
    for consumer in consumers:
        consumer.call.cancel()
        consumer.result()
    leaks.assert_back()


def test_a_front_end_that_hangs_is_replaced(pair: RunningServer, leaks: Leaks) -> None:
    consumers = [started(pair, request([100], 1500)) for _ in range(MANY)]
    os.kill(workers(pair)[0], signal.SIGSTOP)
    eventually(lambda: any(consumer.code == grpc.StatusCode.UNAVAILABLE for consumer in consumers))
    for consumer in consumers:
        consumer.call.cancel()
        consumer.result()
    leaks.assert_back()


def test_abort_finds_a_request_wherever_it_is(pair: RunningServer, leaks: Leaks) -> None:
    consumers = [started(pair, request([100], 1500, request_id=f"abort {n}", sampling=pb.SamplingParams(n=2))) for n in range(MANY)]
    assert all(abort(pair, f"abort {n}") for n in range(MANY))
    assert {consumer.result().reason for consumer in consumers} == {pb.FINISH_REASON_ABORTED}
    assert not any(abort(pair, f"abort {n}") for n in range(MANY))
    leaks.assert_back()


def test_an_id_in_flight_is_refused_by_all(pair: RunningServer, leaks: Leaks) -> None:
    consumer = started(pair, request([100], 1500, request_id="same"))
    for _ in range(MANY):
        error = error_of_server(pair, request([100], 1, request_id="same", sampling=pb.SamplingParams(n=2)))
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "request_id"
    assert consumer.is_alive() and abort(pair, "same")
    assert consumer.result().reason == pb.FINISH_REASON_ABORTED
    assert started(pair, request([100], 2, request_id="same")).result().ids == [101, 102]
    leaks.assert_back()


def test_of_many_with_one_id_one_is_served(pair: RunningServer, leaks: Leaks) -> None:
    with ThreadPoolExecutor(MANY) as threads:
        consumers = list(threads.map(lambda _: Consumer(pair, request([100], 100, request_id="one")), range(3 * MANY)))
    codes = [consumer.result().code for consumer in consumers]
    served = [consumer.ids for consumer in consumers if consumer.code is None]
    assert set(codes) <= {None, grpc.StatusCode.ALREADY_EXISTS} and served == [list(range(101, 201))]
    leaks.assert_back()


def test_a_lost_engine_is_lost_to_all(pair: RunningServer, leaks: Leaks) -> None:
    consumers = [started(pair, request([100], 1500)) for _ in range(MANY)]
    os.kill(pid_of(pair, "engine"), signal.SIGKILL)
    for consumer in consumers:
        error = consumer.result().error
        assert error is not None and detail(error, error_details_pb2.ErrorInfo).reason == "ENGINE_LOST"
    eventually(lambda: all(health(pair, API) == SERVING for _ in range(MANY)))
    assert all(started(pair, request([100], 2)).result().ids == [101, 102] for _ in range(MANY))
    leaks.assert_back()


def test_the_supervisor_has_no_grpc() -> None:
    program = "import sys, inference_service.cli, inference_service.rpc.supervisor; assert not {'grpc', 'torch'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_port_of_two_front_ends_is_not_shared_with_another_server(pair: RunningServer) -> None:
    settings = ("--set=model.load_format=echo", f"--set=server.port={pair.address.rpartition(':')[2]}", "--set=server.workers=2")
    second = subprocess.run([sys.executable, "-m", "inference_service.cli", "serve", *settings], capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and f"server.port: cannot listen on {pair.address}" in second.stderr
    assert "Traceback" not in second.stderr


def test_nor_with_one_that_is_only_about_to_listen() -> None:
    """Both would find the port free, and then each get some of the other's calls."""
    with reserve_ports(Server(port=0)) as first:
        with pytest.raises(SuperviseError, match=rf"server\.port: cannot listen on 127\.0\.0\.1:{first.port}"), reserve_ports(first):
            pass
        with socket.socket() as front_end:
            front_end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            front_end.bind(("127.0.0.1", first.port))


def test_connections_of_a_server_before_do_not_keep_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as before, socket.create_connection(before.getsockname()) as client:
        address = before.getsockname()
        accepted, _ = before.accept()
        accepted.close()  # who closes first keeps the address for a minute
        assert client.recv(1) == b""
    with reserve_ports(Server(port=address[1])) as reserved:
        assert reserved.port == address[1]


def test_a_front_end_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokens.yaml").write_text("[{name: somebody}]")
    settings = ("--set=model.load_format=echo", "--set=server.port=0", "--set=server.workers=2")
    command = [sys.executable, "-m", "inference_service.cli", "serve", *settings, f"--set=security.tokens_file={tmp_path}/tokens.yaml"]
    server = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert server.returncode == 1 and "tokens.yaml" in server.stderr and "Traceback" not in server.stderr


def test_one_that_is_told_to_drain_drains_all(pair: RunningServer, leaks: Leaks) -> None:
    consumers = [started(pair, request([100], 150)) for _ in range(MANY)]
    with pair.stub() as stub:
        stub.Drain(info_pb2.DrainRequest())
    eventually(lambda: all(health(pair, API) == NOT_SERVING for _ in range(MANY)))
    assert all(consumer.result().ids == list(range(101, 251)) for consumer in consumers)
    assert pair.process.wait(60) == 0
    leaks.assert_gone()


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with run_server(tmp_path, *PACED, "server.workers=2") as server:
        leaks = Leaks(server)
        consumers = [started(server, request([100], 1500)) for _ in range(4)]
        server.process.kill()
        assert {consumer.result().code for consumer in consumers} == {grpc.StatusCode.UNAVAILABLE}
        leaks.assert_gone()
