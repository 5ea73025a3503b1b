"""The load generator against servers that others wrote, run for real with SmolLM2 on the CPU: `make test-peers`, which installs them first.

PEERS is the folder they were installed to by baselines/peers/; what is not there is skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baselines.endpoints import Server
from inference_service.config import load_config
from inference_service.fetch import resolve_model

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("PEERS", ROOT / ".peers")).resolve()
VLLM, LLAMA = PEERS / "vllm" / "bin" / "python", PEERS / "llama_cpp" / "llama-server"
SERVERS: dict[str, tuple[Path, dict[str, Any]]] = {
    "grpc": (Path(sys.executable), {"peer": "ours"}),
    "vllm+http": (VLLM, {"peer": "vllm", "program": str(VLLM), "env": {"PYTHONPATH": ""}, "arguments": "--enforce-eager"}),
    "llamacpp+http": (LLAMA, {"peer": "llama_cpp", "program": str(LLAMA), "model": str(LLAMA.with_name("model.gguf"))}),
}
"""By what their targets' URLs begin with: what must be installed, and what the YAML file says."""
INPUT, OUTPUT, REQUESTS = 24, 8, 6

Load = Callable[..., dict[str, Any]]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that is up, without a path."""
    installed, target = SERVERS[request.param]
    if not installed.exists():
        pytest.skip(f"{installed} is not installed")
    address = f"{request.param}://127.0.0.1:{free_port()}"
    directory = tmp_path_factory.mktemp("server")
    tree = {
        "model": {"max_context": 1024},
        "device": {"kind": "cpu"},
        "batch": {"max_requests": 2},
        "comparison": {"targets": {"server": {**target, "url": address}}},
    }
    file = directory / "experiment.yaml"
    file.write_text(yaml.safe_dump(tree))
    server = Server("server", load_config(file), file, str(resolve_model("smollm2-135m-instruct")), directory)
    server.ensure()
    yield address
    server.stop()


@pytest.fixture
def load(url: str, tmp_path: Path) -> Load:
    """Run the load generator with 2 users until REQUESTS have ended; its result's only level, in which a wrong length is an error."""

    def load(path: str = "", **workload: Any) -> dict[str, Any]:
        settings = {
            "loadtest.requests": REQUESTS,
            "loadtest.duration_s": 300,
            "loadtest.trace_file": "spans.jsonl",
            **{f"loadtest.workload.{key}": value for key, value in {"input_tokens": INPUT, "output_tokens": OUTPUT, **workload}.items()},
        }
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen"), "--headless", "--only-summary", "-u", "2"]
        command += ["--target", url + path, "--json-out", "result.json"]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert (tmp_path / "result.json").exists(), ran.stdout + ran.stderr
        (level,) = json.loads((tmp_path / "result.json").read_text())["levels"]
        assert isinstance(level, dict)
        assert level["errors"] == {}
        assert level["requests"]["completed"] >= REQUESTS
        assert 0 < level["ttft_ms"]["p50"] < level["e2e_ms"]["p50"]
        assert level["tpot_ms"]["count"] == level["requests"]["completed"]
        return level

    return load


def check_lengths(level: dict[str, Any]) -> None:
    """Of those beyond REQUESTS, some of the tokens came after the window's end."""
    most = level["requests"]["completed"] + level["requests"]["cut_off"]
    assert INPUT * REQUESTS <= level["tokens"]["input"] <= INPUT * most
    assert OUTPUT * REQUESTS <= level["tokens"]["output"] <= OUTPUT * most


def test_prompts_and_answers_have_exactly_the_lengths_asked_for(load: Load) -> None:
    # Below the special tokens, and the same for all.
    check_lengths(load(vocab_size=49000, temperature=0.8, top_p=0.95, top_k=50))


def test_texts_have_exactly_the_lengths_asked_for(load: Load) -> None:
    check_lengths(load(prompt="text", prefix_share=0.5))


def test_a_conversation_goes_on_with_the_answers(load: Load, url: str) -> None:
    level = load("/chat" if url.startswith("grpc") else "/v1/chat/completions", prompt="text", turns=3)
    assert level["tokens"]["output"] >= OUTPUT * REQUESTS
    # Later turns hold the earlier ones: 24, 56 and 88 tokens, and those of the template.
    assert level["tokens"]["input"] > 1.5 * INPUT * REQUESTS
