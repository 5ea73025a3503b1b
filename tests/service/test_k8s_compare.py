"""The scripts of the comparison's pods, as plain processes: one index with a real server, the others, and a server that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import yaml

from tests.service.pods import HERE, free_port
from tests.unit.k8s_manifests import K8S

COMPARE = K8S / "loadtest" / "compare"
TARGETS = ("ours", "vllm", "tensorrt-llm")


def environment(directory: Path, index: int) -> dict[str, str]:
    """A pod's, with its mounts in a directory."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mounts = {"RUN": directory / "run", "RESULTS": directory / "results", "CONFIG": directory / "config.yaml"}
    for mount in ("RUN", "RESULTS"):
        mounts[mount].mkdir(exist_ok=True)
    return {**os.environ, "PATH": path, "JOB_COMPLETION_INDEX": str(index), **{name: str(path) for name, path in mounts.items()}}


def serve(directory: Path, index: int, turn: int, *command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", COMPARE / "serve.sh", str(turn), *command], env=environment(directory, index))


def test_a_pod_measures_its_target_and_reports(tmp_path: Path) -> None:
    port = free_port()
    tree = yaml.safe_load((COMPARE / "config.yaml").read_text())
    tree["comparison"] |= {"cells": "8/4@1:1", "processes": 1}
    tree["comparison"]["targets"]["ours"]["url"] = f"grpc://127.0.0.1:{port}"
    tree["loadtest"]["workload"]["vocab_size"] = 1000
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    settings = [f"--set={setting}" for setting in (*HERE, f"server.port={port}")]

    locust = subprocess.Popen(["sh", COMPARE / "drive.sh", *TARGETS], env=environment(tmp_path, 0))
    command = (sys.executable, "-m", "inference_service.cli", "serve", "--config", str(tmp_path / "config.yaml"), *settings)
    server = serve(tmp_path, 0, 0, *command)
    try:
        assert serve(tmp_path, 0, 1, "false").wait(10) == 0, "it is not its turn"
        assert server.wait(120) == 0
        assert (tmp_path / "run" / "status").read_text() in ("0\n", "1\n"), "1: on a busy machine a cell may be invalid"
        assert locust.poll() is None, "a sidecar that ends would be started again"
    finally:
        server.kill()
        locust.kill()
    (row,) = json.loads((tmp_path / "results" / "result.json").read_text())
    assert row["requests"] > 0 and row["errors"] == 0
    report = [sys.executable, "-m", "baselines.report", str(tmp_path / "results" / "result.json"), "--targets", ",".join(TARGETS)]
    assert "ours" in subprocess.run(report, capture_output=True, text=True, check=True).stdout


def test_a_server_that_ends_fails_its_pod(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert serve(tmp_path, 2, 2, "false").wait(30) == 1
    assert time.monotonic() - begin < 30
