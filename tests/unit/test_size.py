"""`inference-service size`: its arithmetic against models that are really built, and what it says of models that do not fit."""

from __future__ import annotations

import pytest
import torch

from inference_service.cli import main
from inference_service.config import Config, ConfigError, Kernels, load_config
from inference_service.execution.memory import GIB
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import Setting
from inference_service.kernels.support_row import GPUS as ARCHITECTURES
from inference_service.models.build import Build
from inference_service.models.families import make_model, read_config
from inference_service.size import GPUS, count_parameters, estimate, find_gpu
from tests.unit.k8s_manifests import K8S, ROOT

MODELS = ROOT / "configs" / "models"


def config(*settings: str) -> Config:
    return load_config(None, ["model.dtype=bfloat16", *settings])


def test_weights_are_those_of_the_model() -> None:
    """Published: 30.5 and 8.03 billion parameters; and the memory that a model on this machine takes."""
    sizes = {name: count_parameters(read_config(MODELS / name), torch.bfloat16) for name in ("qwen3-30b-a3b", "llama-3.1-8b")}
    assert sizes == {"qwen3-30b-a3b": 30_532_122_624, "llama-3.1-8b": 8_030_261_248}

    shape = read_config(MODELS / "smollm2-135m")
    operators = make_operators(select(Kernels(), Setting("x86_64", torch.bfloat16, shape.head_dim, shape.heads // shape.kv_heads, 16)))
    model = make_model(Build(operators, torch.bfloat16, torch.device("cpu")), shape)
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.weights().values()}
    assert estimate(config("model.path=smollm2-135m"), 10).weights == sum(storages.values())


def test_tokens_are_what_memory_is_left_for() -> None:
    """Llama 3.1 8B keeps 2 x 32 layers x 8 heads x 128 x 2 bytes a token."""
    size = estimate(config("model.path=llama-3.1-8b", "model.max_context=8192", "batch.max_requests=8"), 80)
    assert size.token_bytes == 131_072
    left = 0.9 * 80 * GIB - size.weights - size.other
    assert 0 <= left - size.kv_tokens * size.token_bytes < 16 * size.token_bytes
    assert size.concurrency(8192) == min(8, size.kv_tokens // 8192)
    assert size.concurrency(65536) == size.kv_tokens // 65536


def test_it_is_near_what_a_start_found() -> None:
    """On an H200 the engine of the pool's configuration, with random weights, had room for 749,696 tokens."""
    found = load_config(K8S / "pools" / "h200" / "config.yaml", ["model.path=qwen3-30b-a3b"])
    assert estimate(found, GPUS["h200"].memory_gib).kv_tokens == pytest.approx(749_696, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "memory_gib", "key"),
    [
        (["model.path=qwen3-30b-a3b"], 44.3, "cache.gpu_memory_fraction"),
        (["model.path=llama-3.1-8b"], 21.9, "model.max_context"),
        (["model.path=llama-3.1-8b", "cache.pages=1000000"], 79.1, "cache.pages"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_the_key(settings: list[str], memory_gib: float, key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}:"):
        estimate(config(*settings), memory_gib)


def test_gpus_are_of_the_support_tables_architectures() -> None:
    assert {gpu.architecture for gpu in GPUS.values()} <= ARCHITECTURES
    with pytest.raises(ConfigError, match="h200"):
        find_gpu("h201")


def test_the_command_prints_memory_and_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("model.path=qwen3-30b-a3b", "model.dtype=bfloat16", "model.max_context=16384")
    main(["size", "--gpu", "H200", *(f"--set={setting}" for setting in settings)])
    output = capsys.readouterr().out
    assert "56.9" in output and "98,304 bytes" in output and "16,384" in output
    with pytest.raises(SystemExit, match="no 'h201'"):
        main(["size", "--gpu", "h201"])
