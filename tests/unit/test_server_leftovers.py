"""What a server that is gone may still hold, and how much memory it took. nvidia-smi is a script that says what is to be said."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from baselines.endpoints import processes
from baselines.memory import PeakMemory, used_gpu_gib


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU of which 20 GiB are used, 12 of them by this process; the file has a line for each GPU."""
    script = tmp_path / "nvidia-smi"
    used = tmp_path / "used"
    used.write_text("0, GPU-a1, 20480\n")
    script.write_text(f'#!/bin/sh\ncase "$1" in *apps*) echo "{os.getpid()}, 12288";; *) cat {used};; esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(processes, "_LET_GO_S", 0.2)
    return used


def test_a_port_that_stays_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_LET_GO_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert processes.left_over("127.0.0.1", port, None) == [f"port {port} is still taken"]
    assert processes.left_over("127.0.0.1", port, None) == []


def test_memory_of_a_gpu_that_does_not_come_back_is_named(gpu: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert used_gpu_gib() == 20
    assert processes.left_over("127.0.0.1", port, 1.0) == ["the GPUs use 20.0 GiB, 1.0 before it began"]
    gpu.write_text("0, GPU-a1, 1100\n")
    assert processes.left_over("127.0.0.1", port, 1.0) == []


def test_peak_memory_is_that_of_the_servers_own_processes(gpu: Path) -> None:
    with PeakMemory(os.getpid()) as mine:
        pass
    assert mine.peak_gib == 12
    # Where nvidia-smi does not know them, all that is used.
    with PeakMemory(None) as unknown:
        pass
    assert unknown.peak_gib == 20


@pytest.mark.parametrize(
    ("visible", "gib"), [("1", 2), ("0,1", 3), ("GPU-b", 2), ("1,-1", 2), ("", 7), ("NoDevFiles", 7), ("MIG-c0ffee", 7)]
)
def test_memory_is_that_of_the_gpus_that_are_visible(gpu: Path, monkeypatch: pytest.MonkeyPatch, visible: str, gib: int) -> None:
    gpu.write_text("0, GPU-a1, 1024\n1, GPU-b2, 2048\n2, GPU-c3, 4096\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert used_gpu_gib() == gib


def test_without_a_gpu_it_is_resident_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with PeakMemory(os.getpid()) as mine, PeakMemory(None) as unknown:
        pass
    assert mine.peak_gib and 0.01 < mine.peak_gib < 100
    assert unknown.peak_gib is None
