"""The admin and the health port, beside the API's."""

from __future__ import annotations

import math
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from inference.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc, info_pb2
from inference.v1 import generate_pb2 as pb
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import detail

API = "inference.v1.InferenceService"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ("model.load_format=echo", "server.admin_port=0", "server.health_port=0")
    with run_server(tmp_path_factory.mktemp("admin"), *settings) as server:
        yield server


def port(server: RunningServer, which: str) -> grpc.Channel:
    found = re.search(rf"{which} on \S*:(\d+)", server.traces.with_name("server.log").read_text())
    assert found
    return grpc.insecure_channel(f"127.0.0.1:{found[1]}")


def services(channel: grpc.Channel) -> set[str]:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=10)
    return {service.name for service in answer.list_services_response.service}


def code(call: Callable[[], Any]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_reflection_and_channelz_are_on_the_admin_port_alone(server: RunningServer) -> None:
    with port(server, "admin") as admin, grpc.insecure_channel(server.address) as api:
        assert {API, "inference.v1.AdminService", "grpc.health.v1.Health", "grpc.channelz.v1.Channelz"} <= services(admin)
        found = channelz_pb2_grpc.ChannelzStub(admin).GetServers(channelz_pb2.GetServersRequest(), timeout=10)
        assert len(found.server) == 3, "API, admin and health"
        assert code(lambda: services(api)) == "UNIMPLEMENTED"
        channelz = channelz_pb2_grpc.ChannelzStub(api)
        assert code(lambda: channelz.GetServers(channelz_pb2.GetServersRequest(), timeout=10)) == "UNIMPLEMENTED"
        profile = admin_pb2_grpc.AdminServiceStub(api)
        assert code(lambda: profile.Profile(admin_pb2.ProfileRequest(), timeout=10)) == "UNIMPLEMENTED"


def test_the_echo_engine_has_nothing_to_profile_and_a_profile_has_an_end(server: RunningServer) -> None:
    with port(server, "admin") as admin:
        stub = admin_pb2_grpc.AdminServiceStub(admin)
        assert code(lambda: stub.Profile(admin_pb2.ProfileRequest(), timeout=10)) == "UNIMPLEMENTED"
        for seconds in (0.0, -1.0, 61.0, math.nan):
            assert code(partial(stub.Profile, admin_pb2.ProfileRequest(seconds=seconds), timeout=10)) == "INVALID_ARGUMENT"


def test_the_sockets_to_the_engine_are_private_to_the_user(server: RunningServer) -> None:
    found = [path for path in Path(tempfile.gettempdir()).glob(f"inference-service-*{server.process.pid}-*") if path.is_dir()]
    assert found and all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in found)


def test_what_clients_may_do_is_on_the_api_port_alone(server: RunningServer) -> None:
    with port(server, "admin") as admin:
        stub = inference_pb2_grpc.InferenceServiceStub(admin)
        assert code(lambda: list(stub.Generate(pb.GenerateRequest(text="hi"), timeout=10))) == "UNIMPLEMENTED"
        assert code(lambda: stub.GetLoad(info_pb2.GetLoadRequest(), timeout=10)) == "UNIMPLEMENTED"


def test_the_health_port_has_health_alone(server: RunningServer) -> None:
    with port(server, "health") as channel:
        for service in ("", API):
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert code(lambda: stub.GetLoad(info_pb2.GetLoadRequest(), timeout=10)) == "UNIMPLEMENTED"
        assert code(lambda: services(channel)) == "UNIMPLEMENTED"


def test_the_admin_port_is_bound_to_loopback(server: RunningServer) -> None:
    assert "admin on 127.0.0.1:" in server.traces.with_name("server.log").read_text()


def test_drain_is_refused_on_the_api_port_and_done_on_the_admin_port(server: RunningServer) -> None:
    with server.stub() as stub, pytest.raises(grpc.RpcError) as caught:
        stub.Drain(info_pb2.DrainRequest(), timeout=10)
    assert caught.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert detail(caught.value, error_details_pb2.ErrorInfo).reason == "ADMIN_PORT_ONLY"
    assert server.process.poll() is None
    with port(server, "admin") as admin:
        inference_pb2_grpc.InferenceServiceStub(admin).Drain(info_pb2.DrainRequest(), timeout=10)
        assert server.process.wait(30) == 0


@pytest.mark.parametrize("key", ["admin_port", "health_port"])
def test_a_taken_port_is_an_error_that_names_its_key(tmp_path: Path, key: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = ["model.load_format=echo", "server.port=0", f"server.{key}={taken.getsockname()[1]}"]
        command = [sys.executable, "-m", "inference_service.cli", "serve", *(f"--set={setting}" for setting in settings)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 1 and f"server.{key}: cannot listen on" in done.stderr and "Traceback" not in done.stderr
