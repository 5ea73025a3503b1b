"""One target's server: found running, or started by its command and stopped again.

A server that was started is a session of its own and outlives the comparison where that is wanted; a file beside the result says which
process it is, so that the next run finds it.
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baselines.endpoints.peer import Launch, Site
from baselines.endpoints.peers import PEERS, NotInstalled, installed_version
from baselines.endpoints.processes import began, end, left_over
from baselines.memory import used_gpu_gib
from inference_service.config import Config

_PROBE_S = 5.0
_POLL_S = 0.25
_API = "inference.v1.InferenceService"


class EndpointError(RuntimeError):
    """The server does not answer, cannot be started, or left something behind; the message names it."""


class Server:
    """One target's server."""

    def __init__(self, name: str, config: Config, file: Path, model: str, directory: Path, beside_others: bool = False) -> None:
        """`file` is the YAML file of `config`, `model` its model's directory; `directory` takes the server's log and state.

        `beside_others`: other servers are up too, so that what is used of the GPUs' memory does not tell what this one has left.
        """
        self.name = name
        self._endpoint = config.comparison.targets[name]
        self.url = self._endpoint.url
        self.peer = PEERS.get(self._endpoint.peer)
        parts = urlsplit(self.url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 0
        self._site = Site(
            config, file, directory, name, self._endpoint.model or model, self._host, self._port, program=self._endpoint.program
        )
        self._beside_others = beside_others
        self._log = directory / f"{name}.log"
        self._state_file = directory / f"{name}.server.json"

    @property
    def pid(self) -> int | None:
        """Of the process that was started, while it lives."""
        state = self._state()
        return state["pid"] if state and began(state["pid"]) == state["began"] else None

    @property
    def facts(self) -> dict[str, Any]:
        """What its rows say of it: the peer, its version, notes, and seconds from the command to readiness where it was started here."""
        state = self._state() or {}
        facts = {"peer": self._endpoint.peer, "version": state.get("version"), "notes": state.get("notes")}
        return {"start_s": state.get("start_s"), **{key: value for key, value in facts.items() if value}}

    def ensure(self, block: int = 1, traces: str = "") -> None:
        """Make sure that it answers, starting it where its command is known; anew, where it was started for another block.

        `traces` is where it may send its own. Raises EndpointError.
        """
        if (state := self._state()) and state["block"] != block:
            self.stop()
        if is_ready(self.url):
            return
        self.stop()
        if not (self._endpoint.serve or self.peer):
            raise EndpointError(f"{self.name}: {self.url} does not answer")
        self._start(block, traces)

    def stop(self) -> None:
        """End what was started, its children too, and wait for that: the next server needs its memory.

        Raises EndpointError where something of it is left.
        """
        state = self._state()
        if state is None:
            return
        # Its group may have outlived it; but another process of its number is none of ours.
        left = [f"process {one}" for one in end(state["pid"])] if began(state["pid"]) in (state["began"], None) else []
        self._state_file.unlink(missing_ok=True)
        if left := left + left_over(self._host, self._port, state.get("gpu_gib")):
            raise EndpointError(f"{self.name} has left something running: {'; '.join(left)}")

    def _launch(self, traces: str) -> tuple[Launch, str]:
        """The command, and the version of what it starts. Raises EndpointError."""
        words = {"python": sys.executable, "model": self._site.model, "file": str(self._site.file)}
        if self._endpoint.serve:
            return Launch([word.format(**words) for word in shlex.split(self._endpoint.serve)]), ""
        assert self.peer
        try:
            # First, since a peer that is not there may not have its model either.
            version = installed_version(self.peer, self._site.program or self.peer.executable or sys.executable, self._endpoint.env)
            launch = self.peer.launch(Site(**{**vars(self._site), "traces": traces}))
        except (NotInstalled, ValueError) as error:
            raise EndpointError(f"{self.name}: {error}") from None
        return Launch(launch.command + shlex.split(self._endpoint.arguments), launch.env, launch.notes), version

    def _start(self, block: int, traces: str) -> None:
        launch, version = self._launch(traces)
        for note in launch.notes:
            print(f"{self.name}: {note}", file=sys.stderr, flush=True)
        gpu_gib, start = None if self._beside_others else used_gpu_gib(), time.monotonic()
        env = {**os.environ, **launch.env, **self._endpoint.env}
        with self._log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    launch.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=env
                )
            except OSError as error:
                raise EndpointError(f"{self.name}: cannot run {launch.command[0]}: {error.strerror}") from None
        state: dict[str, Any] = {"pid": process.pid, "began": began(process.pid), "block": block, "gpu_gib": gpu_gib}
        state |= {"version": version, "notes": launch.notes, "start_s": None}
        self._write_state(state)
        while not is_ready(self.url):
            if process.poll() is not None:
                self.stop()
                raise EndpointError(f"{self.name}: ended with status {process.returncode} before it was ready; see {self._log}")
            if time.monotonic() - start > self._endpoint.ready_s:
                self.stop()
                raise EndpointError(f"{self.name}: not ready after {self._endpoint.ready_s:g} s; see {self._log}")
            time.sleep(_POLL_S)
        self._write_state(state | {"start_s": time.monotonic() - start})

    def _state(self) -> dict[str, Any] | None:
        try:
            state = json.loads(self._state_file.read_text())
        except (OSError, json.JSONDecodeError):
            return None
        return state if isinstance(state, dict) else None

    def _write_state(self, state: dict[str, Any]) -> None:
        self._state_file.write_text(json.dumps(state) + "\n")


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
