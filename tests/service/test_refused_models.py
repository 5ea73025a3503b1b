"""Model directories that cannot be served: the command ends with status 1 and one line that says what to mend."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inference_service.models.synthetic_tokenizer import write_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def write(directory: Path, **config: object) -> None:
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    write_tokenizer(directory)


def of_another_architecture(directory: Path) -> None:
    write(directory, architectures=["MambaForCausalLM"], model_type="mamba")


def with_a_truncated_shard(directory: Path) -> None:
    write(directory)
    shard = directory / "model-00001-of-00001.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(300, 8)}, shard)
    shard.write_bytes(shard.read_bytes()[:-100])


def without_a_tokenizer(directory: Path) -> None:
    write(directory)
    (directory / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (of_another_architecture, ["config.json", "'MambaForCausalLM' is not supported; supported are", "LlamaForCausalLM"]),
        (with_a_truncated_shard, ["model-00001-of-00001.safetensors", "cut off within model.embed_tokens.weight"]),
        (without_a_tokenizer, ["tokenizer.json: no such file"]),
    ],
)
def test_a_model_that_cannot_be_served(tmp_path: Path, make: Callable[[Path], None], words: list[str]) -> None:
    make(tmp_path)
    settings = [f"model.path={tmp_path}", "server.port=0", "telemetry.traces=false", "device.kind=cpu", "device.threads=1"]
    command = [sys.executable, "-m", "inference_service.cli", "serve", *(f"--set={setting}" for setting in settings)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1 and run.stdout == ""
    (line,) = [line for line in run.stderr.splitlines() if line.startswith("inference-service serve: ")]
    assert line == run.stderr.splitlines()[-1]
    assert all(word in line for word in words), line
    assert "Traceback" not in run.stderr
