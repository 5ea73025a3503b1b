"""Real models behind the real server: SmolLM2, and a published shape with random weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from inference_service.client import Client
from inference_service.models.families import FAMILIES
from inference_service.models.synthetic_tokenizer import write_tokenizer
from tests.service.conftest import START_S, run_server


def test_smollm2_answers_with_its_chat_template(tmp_path: Path) -> None:
    with run_server(tmp_path) as server, Client(server.address) as client:
        answer = client.generate_text(
            [{"role": "user", "content": "What is the capital of France?"}], max_tokens=16, temperature=0, logprobs=2
        )
        assert "Paris" in answer.text and answer.usage.completion_tokens <= 16
        assert all(entry.chosen.logprob <= 0 and entry.top[0].logprob >= entry.chosen.logprob for entry in answer.logprobs)
        info = client.model_info()
        assert (info.architecture, info.dtype, info.vocab_size) == ("LlamaForCausalLM", "float32", 49152)
        kernels = {kernel.operator: kernel for kernel in client.server_info().kernels}
        assert kernels["attention_decode"].backend == "torch" and kernels["attention_decode"].reason


def test_a_published_shape_is_served_with_random_weights(tmp_path: Path) -> None:
    with run_server(tmp_path, "model.path=smollm2-135m", "model.load_format=dummy") as server, Client(server.address) as client:
        answer = client.generate_text("any text at all", max_tokens=5, ignore_eos=True, seed=1)
        assert answer.usage.prompt_tokens == len("any text at all") and len(answer.token_ids) == 5
        assert answer.text == client.detokenize(answer.token_ids)


def test_an_unsupported_architecture_ends_the_start_with_one_line(tmp_path: Path) -> None:
    config = {"architectures": ["MambaForCausalLM"], "vocab_size": 300, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_tokenizer(tmp_path)
    command = [sys.executable, "-m", "inference_service.cli", "serve", f"--set=model.path={tmp_path}", "--set=server.port=0"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert refused.returncode == 1
    last = refused.stderr.splitlines()[-1]
    assert all(word in last for word in ("config.json", "MambaForCausalLM", *FAMILIES)), refused.stderr
    assert "Traceback" not in refused.stderr
