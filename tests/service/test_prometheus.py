"""What k8s/observability asks for is what a server tells: by names everywhere, and by Debian's prometheus where that is installed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import request
from tests.service.test_lifecycle import PACED, Consumer, error_of_server, eventually, load, started

OBSERVABILITY = Path(__file__).parents[2] / "k8s" / "observability"
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")
METRIC = re.compile(r"\b(?:gen_ai|inference|process|engine_process)_[a-z_]+\b")
LABELS = {"rpc_response_status_code"}


def dashboard_queries() -> list[str]:
    """What the dashboard's panels and annotations ask, without its variables."""
    dashboard = json.loads((OBSERVABILITY / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
    values = {"$job": ".*", "$instance": ".*", "$__rate_interval": "5m", "$__range": "5m"}
    for variable, value in values.items():
        queries = [query.replace(variable, value) for query in queries]
    return queries


def alert_queries() -> dict[str, str]:
    groups = yaml.safe_load((OBSERVABILITY / "alerts.yaml").read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def metrics_address(server: RunningServer) -> str:
    found = re.search(r"metrics on port (\d+)", (server.traces.parent / "server.log").read_text())
    assert found
    return f"127.0.0.1:{found[1]}"


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def samples(exposition: str) -> dict[str, float]:
    """Those without labels."""
    families = text_string_to_metric_families(exposition)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = ("batch.max_requests=2", "server.max_queue=1", "server.engine_restarts=0", "telemetry.metrics_port=0")
    with run_server(tmp_path_factory.mktemp("prometheus"), *PACED, *settings) as server:
        started(server, request([100, 101], 3)).result()
        yield server


def test_every_metric_that_is_asked_for_is_told(server: RunningServer) -> None:
    told = set(METRIC.findall(get(f"http://{metrics_address(server)}/metrics")))
    for query in [*dashboard_queries(), *alert_queries().values()]:
        asked = set(METRIC.findall(query)) - LABELS
        assert asked <= told, query
        assert asked or query.startswith("up{"), query


def test_every_metric_is_in_the_documentation(server: RunningServer) -> None:
    documented = (OBSERVABILITY.parents[1] / "docs" / "observability.md").read_text()
    for line in get(f"http://{metrics_address(server)}/metrics").splitlines():
        if line.startswith("# TYPE ") and "process_" not in line:
            assert f"`{line.split()[2]}`" in documented, line


def test_each_of_several_front_ends_is_a_target_and_their_sums_are_right(tmp_path: Path) -> None:
    with run_server(
        tmp_path, "model.load_format=echo", "server.workers=2", "telemetry.metrics_port=0", "telemetry.log_format=json"
    ) as server:
        for _ in range(8):  # each on a connection of its own
            started(server, request([100, 101], 3)).result()
        logged = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines()]
        ports = {line["process"]: line["message"].rpartition(" ")[2] for line in logged if line["message"].startswith("metrics on port ")}
        told = {process: samples(get(f"http://127.0.0.1:{port}/metrics")) for process, port in ports.items()}
    assert sorted(told) == ["worker 0", "worker 1"]
    assert sum(each["inference_output_tokens_total"] for each in told.values()) == 24
    assert told["worker 0"]["inference_step_requests_sum"] == 24 and told["worker 0"]["engine_process_open_fds"] > 0
    assert not any("step" in name or "inference_kv" in name or "engine" in name for name in told["worker 1"])
    assert [each["inference_ready"] for each in told.values()] == [1, 1]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool, of Debian's package prometheus, is not installed")
def test_alert_rules_fire_when_they_should() -> None:
    for command in (["check", "rules", "alerts.yaml"], ["check", "config", "prometheus.yaml"], ["test", "rules", "alerts_test.yaml"]):
        ran = subprocess.run(["promtool", *command], cwd=OBSERVABILITY, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
    tests = yaml.safe_load((OBSERVABILITY / "alerts_test.yaml").read_text())["tests"]
    fired = {test["alertname"] for each in tests for test in each["alert_rule_test"] if test.get("exp_alerts")}
    quiet = {test["alertname"] for each in tests for test in each["alert_rule_test"] if not test.get("exp_alerts")}
    assert fired == quiet == alert_queries().keys(), "each is seen to fire, and not to"


class Prometheus:
    """A running one."""

    def __init__(self, address: str) -> None:
        self._address = address

    def api(self, path: str, **parameters: str) -> Any:
        return json.loads(get(f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"))["data"]

    def values(self, query: str) -> list[float]:
        return [float(sample["value"][1]) for sample in self.api("query", query=query)["result"]]

    def alerts(self) -> dict[str, str]:
        """States of those that are not at rest."""
        return {alert["labels"]["alertname"]: alert["state"] for alert in self.api("alerts")["alerts"]}

    @property
    def is_up(self) -> bool:
        try:
            return bool(self.values("up == 1"))
        except OSError:
            return False


@contextmanager
def run_prometheus(directory: Path, target: str) -> Iterator[Prometheus]:
    """Debian's, with this repository's configuration and rules, scraping and evaluating each second."""
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(OBSERVABILITY / "alerts.yaml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [target]
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={directory}/prometheus.yaml", f"--storage.tsdb.path={directory}/data"]
    with (directory / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=log)
    try:
        prometheus = Prometheus(address)
        eventually(lambda: prometheus.is_up, timeout=60)
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)


@needs_prometheus
def test_prometheus_sees_load_and_failures_and_raises_the_alarms(server: RunningServer, tmp_path: Path) -> None:
    with run_prometheus(tmp_path, metrics_address(server)) as prometheus:
        eventually(lambda: prometheus.values("inference_ready") == [1])
        eventually(lambda: prometheus.alerts() == {})
        running = [started(server, request([100], 1500)) for _ in range(2)]
        waiting = Consumer(server, request([100], 1500))
        eventually(lambda: load(server).waiting == 1)
        for _ in range(20):
            assert error_of_server(server, request([100], 1)).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        eventually(lambda: prometheus.values('inference_refusals_total{reason="QUEUE_FULL"}') == [20])
        busy = "inference_running_requests == 2 and inference_queue_requests == 1 and inference_kv_used > 0 and inference_streams == 3"
        eventually(lambda: bool(prometheus.values(busy)))
        eventually(lambda: prometheus.alerts() == {"InferenceRefusals": "pending"})
        for query in dashboard_queries():
            assert prometheus.api("query", query=query)["result"] or " > 0" in query, f"no series for {query}"
        waiting.call.cancel()
        assert waiting.result().code == grpc.StatusCode.CANCELLED

        os.kill(server.engine_pid, signal.SIGKILL)
        for consumer in running:
            assert consumer.result().code == grpc.StatusCode.UNAVAILABLE
        expected = {
            "InferenceEngineLost": "firing",
            "InferenceErrors": "pending",
            "InferenceNotReady": "pending",
            "InferenceRefusals": "pending",
        }
        eventually(lambda: prometheus.alerts() == expected, timeout=30)
        assert prometheus.values('inference_requests_total{rpc_response_status_code="UNAVAILABLE"}') == [2]
        assert prometheus.values("inference_streams") == prometheus.values("inference_telemetry_open_spans") == [0]
        assert server.stop() == 0
        eventually(lambda: prometheus.alerts().get("InferenceDown") == "pending", timeout=30)
