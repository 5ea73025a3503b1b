"""Pods as plain processes: a container's own command line and probes, on this machine's ports and without a GPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.unit.k8s_manifests import Pool

HERE = (
    "server.host=127.0.0.1",
    "device.kind=cpu",
    "device.arch=auto",
    "model.path=smollm2-135m-instruct",
    "model.load_format=echo",
    "model.echo_step_ms=5",
    "model.dtype=float32",
    "model.max_context=2048",
    "batch.max_requests=16",
    "cache.pages=1000",
    "kernels.moe=auto",
    "telemetry.traces=false",
    "server.drain_propagation_s=1.5",
    "server.drain_s=20",
)
"""What stands for the pool's GPU and model, and drains in a test's time."""


class Pod:
    """The server of a pool, as the kubelet runs it."""

    def __init__(self, pool: Pool, directory: Path, *further: str) -> None:
        """`further` are more arguments."""
        container = pool.workload.container("server")
        file = directory / "config.yaml"
        file.write_text(pool.one("ConfigMap")["data"]["config.yaml"])
        self._probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        self._ports = {port["containerPort"]: free_port() for port in container["ports"]}
        self.address = f"127.0.0.1:{self._ports[pool.config.server.port]}"
        self._metrics_port = self._ports[pool.config.telemetry.metrics_port or 0]
        arguments = [argument.replace("/etc/inference-service/config.yaml", str(file)) for argument in container["args"]]
        arguments += [*further, f"--set=server.admin_port={free_port()}", *(f"--set={setting}" for setting in HERE)]
        for key, port in {
            "server.port": pool.config.server.port,
            "server.health_port": pool.config.server.health_port,
            "telemetry.metrics_port": pool.config.telemetry.metrics_port,
        }.items():
            arguments.append(f"--set={key}={self._ports[port or 0]}")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
        self._log = directory / f"{self.address}.log"
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "inference_service.cli", *arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def probe(self, name: str) -> bool:
        """One try, as the kubelet makes it: a new connection in plaintext, and SERVING within the time."""
        probe: dict[str, Any] = self._probes[name]
        with grpc.insecure_channel(f"127.0.0.1:{self._ports[probe['grpc']['port']]}") as channel:
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            try:
                status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=probe["timeoutSeconds"]).status
            except grpc.RpcError:
                return False
        return bool(status == health_pb2.HealthCheckResponse.SERVING)

    def wait(self, name: str, succeeds: bool = True, timeout_s: float = 60) -> None:
        """Until a probe has that outcome."""
        end = time.monotonic() + timeout_s
        while self.probe(name) != succeeds:
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < end, f"{name} did not become {succeeds}: {self._log.read_text()}"
            time.sleep(0.1)

    def metrics(self) -> dict[str, float]:
        """What Prometheus would scrape, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def terminate(self) -> None:
        """What the kubelet sends after preStop."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def free_port() -> int:
    """One that was free just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
