"""The load test's Jobs as plain processes: their own command lines, a master and two workers against one server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.service.conftest import RunningServer
from tests.service.pods import free_port
from tests.unit.k8s_manifests import ROOT, Cluster, Workload


def command(job: str, directory: Path, changes: dict[str, str]) -> list[str]:
    """The container's command, with paths and options of this machine instead."""
    words = Workload(Cluster().find("Job", job)).container("locust")["command"]
    paths = {"/opt/inference-service": str(ROOT), "/etc/loadtest": str(directory), "/results": str(directory)}
    for there, here in paths.items():
        words = [word.replace(there, here) for word in words]
    assert all(any(word.startswith(f"{option}=") for word in words) for option in changes), words
    kept = [word for word in words if word.partition("=")[0] not in changes]
    return [sys.executable, "-m", *kept, *(f"{option}={value}" for option, value in changes.items())]


def test_master_and_workers_write_a_result(echo_server: RunningServer, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        f"loadtest: {{target: grpc://{echo_server.address}, concurrency: [4], duration_s: 1, slo: {{ttft_ms: 5000}},"
        f" workload: {{input_tokens: 8, output_tokens: 8}}, trace_file: {tmp_path}/traces.jsonl}}\n"
    )
    port = str(free_port())
    master = subprocess.Popen(
        [*command("loadtest-master", tmp_path, {"--expect-workers": "2"}), f"--master-bind-port={port}"], cwd=tmp_path
    )
    workers = subprocess.Popen(
        [*command("loadtest-workers", tmp_path, {"--master-host": "127.0.0.1", "--processes": "2"}), f"--master-port={port}"], cwd=tmp_path
    )
    try:
        assert master.wait(90) in (0, 4), "4: on a busy machine the result is not to be trusted"
        assert workers.wait(30) == 0, "the workers end with their master"
    finally:
        master.kill()
        workers.terminate()
    (level,) = json.loads((tmp_path / "result.json").read_text())["levels"]
    assert level["requests"]["completed"] > 0 and level["requests"]["failed"] == 0
    assert (tmp_path / "result.html").stat().st_size > 0
