"""Peers that vanish, stall, trickle or hang up: what becomes of their streams, and that nothing is left of them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from inference.v1 import generate_pb2 as pb
from tests.faults.leaks import Leaks, gauges
from tests.faults.toxic import through, toxic
from tests.fuzz import frames
from tests.service.certificates import make_authority, sign
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import request
from tests.service.test_lifecycle import API, PACED, SERVING, Consumer, eventually, health, load, started
from tests.service.test_prometheus import get, metrics_address

KEEPALIVE_S, STUCK_S = 1.0, 2.0
TAIL = [102, 103, 104]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = (f"server.keepalive_s={KEEPALIVE_S}", f"server.stuck_reader_s={STUCK_S}", "telemetry.metrics_port=0")
    with run_server(tmp_path_factory.mktemp("network"), *PACED, *settings) as server:
        yield server


@pytest.fixture(scope="module")
def leaks(server: RunningServer) -> Leaks:
    for _ in range(3):
        assert_serves(server)
    return Leaks(server)


def assert_serves(server: RunningServer) -> None:
    assert health(server, "") == health(server, API) == SERVING
    assert started(server, request([100, 101], 3)).result().ids == TAIL


def statuses(server: RunningServer) -> Counter[str]:
    """Requests that have ended, by status, as the server sees it."""
    told = get(f"http://{metrics_address(server)}/metrics")
    found = re.findall(r'^inference_requests_total{.*rpc_response_status_code="(\w+)".*} (\S+)$', told, re.MULTILINE)
    return Counter({code: int(float(count)) for code, count in found})


def assert_cancelled(server: RunningServer, before: Counter[str], count: int) -> None:
    """So many requests, and no other ones, have ended since, as clients' own."""
    eventually(lambda: statuses(server) - before == Counter(CANCELLED=count))


def assert_prefix(consumer: Consumer) -> None:
    assert consumer.ids == list(range(101, 101 + len(consumer.ids))), "no token is lost, none comes twice"


def test_a_half_open_connection_is_found(server: RunningServer, leaks: Leaks) -> None:
    """The peer's machine is gone: no FIN, no RST. Streams are open on one connection, and nothing on the other."""
    before = statuses(server)
    with toxic(server) as proxy:
        consumers = [started(through(proxy, server), request([100], 1500)) for _ in range(3)]
        with grpc.insecure_channel(proxy.address, options=[("grpc.use_local_subchannel_pool", 1)]) as idle:
            grpc.channel_ready_future(idle).result(30)
            proxy.stall()
            leaks.assert_back()
            assert_cancelled(server, before, 3)
            assert all(consumer.is_alive() for consumer in consumers), "nobody has told them"
            assert_serves(server)
    for consumer in consumers:
        assert consumer.result().code == grpc.StatusCode.UNAVAILABLE
        assert_prefix(consumer)
    leaks.assert_back()


def test_a_silent_connection_whose_peer_lives_is_kept(server: RunningServer) -> None:
    with toxic(server) as proxy, through(proxy, server).stub() as stub:
        assert list(stub.Generate(request([100, 101], 1), timeout=30))
        proxy.downstream_bytes = 0  # of connections to come: there must be none
        time.sleep(4 * KEEPALIVE_S)
        assert list(stub.Generate(request([100, 101], 1), timeout=30))


def test_a_client_that_is_killed_in_mid_stream(server: RunningServer, leaks: Leaks) -> None:
    before = statuses(server)
    program = f"""
import grpc
from inference.v1 import generate_pb2 as pb, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel("{server.address}"))
made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * 9), stopping=pb.StopConditions(ignore_eos=True))
calls = [stub.Generate(made) for _ in range(3)]
for call in calls: next(call)
print("all are read from", flush=True)
for call in calls: list(call)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as client:
        assert client.stdout is not None and client.stdout.readline()
        assert load(server).pages_used > 0 and gauges(server)["streams"] == 3
        client.kill()
        assert_cancelled(server, before, 3)
        leaks.assert_back()
    assert_serves(server)


def test_a_reader_that_is_stuck_holds_next_to_nothing_though_it_stays(server: RunningServer, leaks: Leaks) -> None:
    """It answers pings, but takes no messages; until it does, what gRPC has of its call is all that is held."""
    before = statuses(server)
    with grpc.insecure_channel(server.address, options=[("grpc.http2.bdp_probe", 0)]) as channel:
        made = request([100], 1500, sampling=pb.SamplingParams(n=8), output=pb.OutputOptions(logprobs=1))
        call = channel.unary_stream(f"/{API}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString)(made)
        first = next(call)
        assert first.HasField("accepted")
        eventually(lambda: statuses(server) - before == Counter(RESOURCE_EXHAUSTED=1), timeout=60)
        eventually(lambda: load(server).pages_used == load(server).running == 0)
        eventually(lambda: gauges(server) - leaks.before <= Counter(tasks=1), timeout=60)
        assert_serves(server)
        ids: dict[int, list[int]] = {index: [] for index in range(8)}
        with pytest.raises(grpc.RpcError) as caught:
            for event in call:
                ids[event.delta.index] += event.delta.token_ids
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for each in ids.values():
            assert each and each == list(range(101, 101 + len(each)))
    leaks.assert_back()


@pytest.mark.parametrize("sent", [b"", frames.PREFACE[:10], frames.begin(), frames.begin() + frames.request(frames.generate())])
def test_connections_that_say_too_little_are_given_up(server: RunningServer, leaks: Leaks, sent: bytes) -> None:
    """Nothing, half a greeting, no more than that, and a call without its request; and no ping is answered."""
    connections = [socket.create_connection(server.address.split(":"), timeout=30) for _ in range(20)]  # type: ignore[arg-type]
    for connection in connections:
        connection.sendall(sent)
    assert_serves(server)
    for connection in connections:
        try:
            while connection.recv(1 << 16):
                pass
        except ConnectionResetError:
            continue
    leaks.assert_back()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00"], ids=["nothing", "the beginning of a hello"])
def test_a_tls_handshake_that_does_not_go_on_is_given_up(tls_server: RunningServer, sent: bytes) -> None:
    open_files = Path(f"/proc/{tls_server.process.pid}/fd")

    def give_up(count: int) -> list[socket.socket]:
        connections = [socket.create_connection(tls_server.address.split(":"), timeout=30) for _ in range(count)]  # type: ignore[arg-type]
        for connection in connections:
            connection.sendall(sent)
        for connection in connections:
            assert connection.recv(1) == b""
        return connections

    give_up(1)[0].close()  # for whatever the server opens once, with its first connection
    before = len(list(open_files.iterdir()))
    connections = give_up(20)
    eventually(lambda: len(list(open_files.iterdir())) <= before)
    for connection in connections:
        connection.close()


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("tls")
    signed = sign(make_authority(directory), directory, "server")
    keys = (f"security.tls_certificate={signed.certificate}", f"security.tls_key={signed.key}")
    with run_server(directory, *PACED, *keys, f"server.keepalive_s={KEEPALIVE_S}") as server:
        yield server


def test_a_slow_network_that_cuts_frames_to_pieces_loses_nothing(server: RunningServer, leaks: Leaks) -> None:
    with toxic(server) as proxy:
        proxy.piece, proxy.delay_s = 7, 0.001
        consumers = [started(through(proxy, server), request([100 * n], 40)) for n in range(1, 4)]
        for n, consumer in enumerate(consumers, 1):
            assert consumer.result().ids == list(range(100 * n + 1, 100 * n + 41))
    leaks.assert_back()
    assert_serves(server)


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("most", [100, 400, 1001, 2003])
def test_a_connection_that_is_cut_within_a_frame_of_the_answer(server: RunningServer, leaks: Leaks, most: int, resets: bool) -> None:
    before = statuses(server)
    with toxic(server) as proxy:
        proxy.downstream_bytes, proxy.resets = most, resets
        consumers = [Consumer(through(proxy, server), request([100], 1500)) for _ in range(2)]
        for consumer in consumers:
            assert consumer.result().code == grpc.StatusCode.UNAVAILABLE
            assert_prefix(consumer)
    leaks.assert_back()
    assert_cancelled(server, before, 2)
    assert_serves(server)


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
def test_a_connection_that_is_cut_within_the_request(server: RunningServer, leaks: Leaks, resets: bool) -> None:
    with toxic(server) as proxy:
        proxy.upstream_bytes, proxy.resets = 3000, resets
        consumer = Consumer(through(proxy, server), request(list(range(100, 1900)), 1500))
        assert consumer.result().code == grpc.StatusCode.UNAVAILABLE and not consumer.ids
    leaks.assert_back()
    assert_serves(server)
