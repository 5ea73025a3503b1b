"""What the pools' containers run, as plain processes: the command line, the probes, the drain, and a rollout under load."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import yaml

from inference.v1 import generate_pb2 as pb
from inference.v1.inference_pb2_grpc import InferenceServiceStub
from inference_service.balancing import spread
from inference_service.client import Client, InferenceError
from tests.service.certificates import make_authority, sign
from tests.service.pods import Pod
from tests.unit.k8s_manifests import K8S, ROOT, Cluster, Pool

TOKENS = 40


@pytest.fixture
def pool() -> Pool:
    return Cluster().pools["h100"]


@pytest.fixture
def pods(pool: Pool, tmp_path: Path) -> Iterator[list[Pod]]:
    """Two, starting."""
    made = [Pod(pool, tmp_path) for _ in range(2)]
    try:
        yield made
    finally:
        for pod in made:
            pod.kill()


def documented() -> tuple[str, str]:
    """The channel's option that docs/operations.md gives clients of any language."""
    block = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.DOTALL)
    assert block
    return "grpc.service_config", json.dumps(json.loads(block[1]))


class Caller(threading.Thread):
    """Sends a request as soon as the one before it has ended, until it is told to stop."""

    def __init__(self, addresses: list[str], option: tuple[str, str]) -> None:
        super().__init__(daemon=True)
        # As a resolver gives them for a headless Service's name.
        options = [option, ("grpc.max_reconnect_backoff_ms", 500), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.insecure_channel(f"ipv4:{','.join(addresses)}", options)
        self._told_to_stop = threading.Event()
        self.completed = 0
        self.failures: list[str] = []
        self.start()

    def run(self) -> None:
        stub = InferenceServiceStub(self._channel)
        stopping = pb.StopConditions(max_tokens=TOKENS, ignore_eos=True)
        while not self._told_to_stop.is_set():
            try:
                events = list(stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100]), stopping=stopping), timeout=30))
                assert events[-1].finished.usage.completion_tokens == TOKENS, events[-1]
                self.completed += 1
            except (grpc.RpcError, AssertionError) as error:
                self.failures.append(str(error))

    def end(self) -> None:
        self._told_to_stop.set()
        self.join(60)
        self._channel.close()


def served(pod: Pod) -> float:
    """Requests that it has answered."""
    return sum(value for name, value in pod.metrics().items() if name.startswith("inference_requests_total{"))


def until_served_by(pods: list[Pod], seconds: float = 30) -> None:
    """Wait until clients go round."""
    end = time.monotonic() + seconds
    while not all(served(pod) for pod in pods):
        assert time.monotonic() < end, "a pod is passed over"
        time.sleep(0.1)


def test_a_rollout_under_load_fails_no_request(pool: Pool, pods: list[Pod], tmp_path: Path) -> None:
    old, new = pods
    assert not old.probe("readiness")
    old.wait("startup")
    old.wait("readiness")
    new.wait("readiness")
    query = pool.one("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]
    metric = re.fullmatch(r"sum\((\w+)\{.*\}\)", query)
    assert metric and any(name.partition("{")[0] == metric[1] for name in old.metrics()), "KEDA asks for what is not there"
    callers = [Caller([old.address, new.address], option) for option in (documented(), spread()) for _ in range(3)]
    try:
        until_served_by(pods)
        old.terminate()
        old.wait("readiness", succeeds=False)
        assert old.probe("liveness"), "a pod that drains is not to be restarted"
        assert old.process.wait(pool.workload.pod["terminationGracePeriodSeconds"]) == 0
        alone = served(new)
        time.sleep(1)
        assert served(new) > alone
    finally:
        for caller in callers:
            caller.end()
    assert [caller.failures for caller in callers] == [[]] * len(callers)
    assert all(caller.completed > 3 for caller in callers)


def test_a_rollout_without_a_drain_would_fail_requests(pods: list[Pod]) -> None:
    """So that the test before this one could see it."""
    old, new = pods
    for pod in pods:
        pod.wait("readiness")
    callers = [Caller([old.address, new.address], spread()) for _ in range(8)]
    until_served_by(pods)
    old.kill()
    time.sleep(0.5)
    for caller in callers:
        caller.end()
    assert any(caller.failures for caller in callers)
    assert new.probe("readiness")


def test_probes_go_on_where_the_api_speaks_tls(pool: Pool, tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    server = sign(authority, tmp_path, "server")
    component = yaml.safe_load((K8S / "tls" / "deployment.yaml").read_text())
    arguments = [change["value"] for change in component if change["path"].endswith("/args/-")]
    files = {"/etc/tls/tls.crt": str(server.certificate), "/etc/tls/tls.key": str(server.key)}
    pod = Pod(pool, tmp_path, *(f"{argument.partition('=/')[0]}={files['/' + argument.partition('=/')[2]]}" for argument in arguments))
    try:
        pod.wait("startup")
        assert pod.probe("readiness") and pod.probe("liveness")
        with Client(pod.address, grpc.ssl_channel_credentials(authority.certificate.read_bytes())) as client:
            assert client.generate_text([100], max_tokens=2, ignore_eos=True).token_ids == [101, 102]
        with Client(pod.address) as client, pytest.raises(InferenceError):
            client.generate_text([100], max_tokens=2, timeout=10)
    finally:
        pod.kill()
