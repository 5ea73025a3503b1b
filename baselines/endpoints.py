"""The servers under comparison: found running, or started by their command and stopped again.

A server that was started is a session of its own and outlives the comparison where that is wanted; a file beside the result says which
process it is, so that the next run finds it.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inference_service.config import Endpoint

_PROBE_S = 5.0
_POLL_S = 0.25
_STOP_S = 60.0
"""Then a server that was asked to end is killed."""
_API = "inference.v1.InferenceService"


class EndpointError(RuntimeError):
    """The server does not answer, or cannot be started; the message names it."""


class Server:
    """One target's server."""

    def __init__(self, name: str, endpoint: Endpoint, directory: Path, model: str, file: Path) -> None:
        """`directory` takes its log and state; `model` and `file` are put into its command."""
        self.name = name
        self.url = endpoint.url
        self._endpoint = endpoint
        self._log = directory / f"{name}.log"
        self._state_file = directory / f"{name}.server.json"
        self._words = {"python": sys.executable, "model": model, "file": str(file)}

    @property
    def pid(self) -> int | None:
        """Of the process that was started, while it lives."""
        state = self._state()
        return state["pid"] if state and _began(state["pid"]) == state["began"] else None

    @property
    def start_s(self) -> float | None:
        """From the command to readiness; None where it was not started here."""
        state = self._state()
        return state["start_s"] if state else None

    def ensure(self) -> None:
        """Make sure that it answers, starting it where its command is known. Raises EndpointError."""
        if is_ready(self.url):
            return
        if not self._endpoint.serve:
            raise EndpointError(f"{self.name}: {self.url} does not answer")
        self.stop()
        self._start()

    def stop(self) -> None:
        """End what was started, its children too, and wait for that: the next server needs its memory."""
        pid = self.pid
        if pid:
            os.kill(pid, signal.SIGTERM)
            if not _wait_gone(pid, _STOP_S):
                os.killpg(pid, signal.SIGKILL)
                _wait_gone(pid, _STOP_S)
        self._state_file.unlink(missing_ok=True)

    def _start(self) -> None:
        began = time.monotonic()
        command = [word.format(**self._words) for word in shlex.split(self._endpoint.serve)]
        with self._log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **self._endpoint.env},
                )
            except OSError as error:
                raise EndpointError(f"{self.name}: cannot run {command[0]}: {error.strerror}") from None
        self._write_state(process.pid, None)
        while not is_ready(self.url):
            if process.poll() is not None:
                raise EndpointError(f"{self.name}: ended with status {process.returncode} before it was ready; see {self._log}")
            if time.monotonic() - began > self._endpoint.ready_s:
                self.stop()
                raise EndpointError(f"{self.name}: not ready after {self._endpoint.ready_s:g} s; see {self._log}")
            time.sleep(_POLL_S)
        self._write_state(process.pid, time.monotonic() - began)

    def _state(self) -> dict[str, Any] | None:
        try:
            state = json.loads(self._state_file.read_text())
        except (OSError, json.JSONDecodeError):
            return None
        return state if isinstance(state, dict) else None

    def _write_state(self, pid: int, start_s: float | None) -> None:
        self._state_file.write_text(json.dumps({"pid": pid, "began": _began(pid), "start_s": start_s}) + "\n")


def is_ready(url: str) -> bool:
    """Whether the server takes requests: by gRPC's health service, or by OpenAI's list of models; a server that is known by name by its
    /health, since llama.cpp lists its model before it has loaded it."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "grpc":
            with grpc.insecure_channel(parts.netloc) as channel:
                request = health_pb2.HealthCheckRequest(service=_API)
                status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_PROBE_S).status
                return bool(status == health_pb2.HealthCheckResponse.SERVING)
        connection = http.client.HTTPConnection(parts.netloc, timeout=_PROBE_S)
        try:
            connection.request("GET", "/health" if "+" in parts.scheme else "/v1/models")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (grpc.RpcError, OSError, http.client.HTTPException):
        return False


def _began(pid: int) -> str | None:
    """When a process began, in the kernel's ticks, which tells it from a later one of the same id; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _wait_gone(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(ChildProcessError):  # where another run started it
            os.waitpid(group, os.WNOHANG)
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(_POLL_S)
    return False
