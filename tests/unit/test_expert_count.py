"""The count of different experts that a step touches, from a tiny Qwen3-MoE on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baselines.probe_experts import figures
from inference.v1 import info_pb2
from inference_service.config import load_config
from inference_service.engine.step import Row, StepPlan
from inference_service.execution.executor import TorchExecutor, build_executor
from inference_service.execution.expert_count import STEPS, ExpertCounter
from inference_service.messages import Sampling

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_experts": 12,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.fixture(params=[[], [1]], ids=["all-sparse", "one-dense"])
def executor(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"mlp_only_layers": request.param}))
    settings = ["device.kind=cpu", "model.load_format=dummy", "cache.pages=64", "batch.max_requests=4"]
    made = build_executor(load_config(None, settings), tmp_path, lambda line: None)
    assert isinstance(made, TorchExecutor)
    yield made
    made.close()


def test_it_is_what_the_layers_chose(executor: TorchExecutor) -> None:
    operators: Any = executor._model.operators
    plain, chosen = operators.routing, []

    def routing(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids_TK, weights_TK = plain(logits_TE, top_k, renormalize)
        chosen.append(ids_TK)
        return ids_TK, weights_TK

    for layer in executor._model.layers:
        if hasattr(layer.mlp, "routing"):
            layer.mlp.routing = routing
    pages = [list(range(16 * slot, 16 * slot + 16)) for slot in range(3)]
    prompts = [Row(slot, 0, 4, [7 * slot + token for token in range(4)], pages[slot], True, GREEDY) for slot in range(3)]
    assert executor.launch(StepPlan(prompts)).wait().distinct_experts is None
    counted = 0
    for step in range(2 * STEPS):
        chosen.clear()
        rows = [Row(slot, 4 + step, 1, [], pages[slot], True, GREEDY) for slot in range(3)]
        distinct = executor.launch(StepPlan(rows)).wait().distinct_experts
        if distinct is not None:
            counted += 1
            assert distinct == pytest.approx(sum(len(set(ids.flatten().tolist())) for ids in chosen) / len(chosen))
            assert 2 <= distinct <= 6
    assert counted == 2


def test_padded_tokens_and_experts_that_several_choose_count_once() -> None:
    chosen = [torch.tensor([[0, 1], [1, 2], [7, 6]], dtype=torch.int32), torch.tensor([[3, 4], [3, 4], [0, 1]], dtype=torch.int32)]
    assert ExpertCounter(8).count(chosen, 2).item() == (3 + 2) / 2


def test_a_model_without_experts_is_not_counted_nor_a_step_with_prefill() -> None:
    assert not any(ExpertCounter(0).wants(True) for _ in range(3 * STEPS))
    counter = ExpertCounter(8)
    assert not any(counter.wants(False) for _ in range(3 * STEPS))
    assert sum(counter.wants(step % 2 == 0) for step in range(4 * STEPS)) == 2


def test_the_probe_takes_the_largest_batch_that_fits() -> None:
    experts = [info_pb2.ExpertLoad(batch=batch, steps=3, distinct_experts=10.0 + batch) for batch in (2, 20, 31, 33)]
    assert figures(experts, 32) == {"distinct_experts": 41.0, "experts_batch": 31}
    assert figures(experts, 2)["distinct_experts"] == 12.0
    nothing = {"distinct_experts": None, "experts_batch": None}
    assert figures(experts, 8) == figures(experts, 1) == figures([], 32) == nothing
