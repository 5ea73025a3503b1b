"""The probe of `baselines.compare`, against a server that runs a tiny model with experts."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inference_service.client import Client
from inference_service.execution.expert_count import STEPS
from inference_service.models.synthetic_tokenizer import write_tokenizer
from tests.service.conftest import run_server
from tests.service.test_loadgen import ROOT
from tests.unit.test_expert_count import TINY


def probe(address: str, batch: int) -> dict[str, float | None]:
    command = [sys.executable, "-m", "baselines.probe_experts", "--target", f"grpc://{address}", "--batch", str(batch)]
    printed: dict[str, float | None] = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    return printed


def test_a_server_tells_the_experts_of_its_decode_steps(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    write_tokenizer(tmp_path)
    settings = [f"model.path={tmp_path}", "model.load_format=dummy", "device.kind=cpu", "cache.memory_gib=0.05"]
    with run_server(tmp_path, *settings) as server, Client(server.address) as client:
        assert probe(server.address, 4) == {"distinct_experts": None, "experts_batch": None}

        def answer(seed: int) -> int:
            return len(client.generate_text([seed, 7, 9], max_tokens=3 * STEPS, ignore_eos=True).token_ids)

        assert answer(1) == 3 * STEPS
        # A token alone chooses two experts in each layer.
        assert probe(server.address, 1) == {"distinct_experts": 2.0, "experts_batch": 1}
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(answer, range(4))) == [3 * STEPS] * 4
        told = probe(server.address, 4)
        assert told["experts_batch"] in (2, 3, 4) and 2.0 <= (told["distinct_experts"] or 0.0) <= 8.0
