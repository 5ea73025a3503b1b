"""Published shapes without checkpoints: random weights, and a tokenizer that any engine can load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from inference_service.models.dummy import fill_dummy
from inference_service.models.synthetic_tokenizer import servable_directory

CONFIGS = Path(__file__).parents[2] / "configs" / "models"


def test_random_weights_are_small_seeded_and_leave_norms_at_one() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        made = {"a.weight": torch.empty(400, 50), "b.weight": torch.empty(400, 50), "x.q_norm.weight": torch.empty(8)}
        fill_dummy(made, seed)
        return made

    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["a.weight"], other["a.weight"])
    assert not torch.equal(one["a.weight"], one["b.weight"])
    assert 0.99e-3 < one["a.weight"].abs().max() <= 1e-3
    assert abs(float(one["a.weight"].mean())) < 2e-5
    assert torch.equal(one["x.q_norm.weight"], torch.ones(8))


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-30b-a3b"])
def test_a_shape_gets_a_tokenizer_of_its_vocabulary(tmp_path: Path, name: str) -> None:
    model_dir = servable_directory(CONFIGS / name, tmp_path)
    config = json.loads((model_dir / "config.json").read_text())
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    assert len(tokenizer) == config["vocab_size"]
    text = "Grüße, 世界 🌍!\n\tx  y"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([300, 301]) == " w300 w301"
    if config["eos_token_id"] >= 256:
        assert tokenizer.eos_token_id == config["eos_token_id"]
        assert tokenizer.decode([65, config["eos_token_id"]], skip_special_tokens=True) == tokenizer.decode([65])


def test_the_tokenizer_is_made_once_and_anew_for_another_config(tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 400, "eos_token_id": [399, 398]}))
    made = servable_directory(shape, tmp_path / "cache")
    stamp = (made / "tokenizer.json").stat().st_mtime_ns
    assert servable_directory(shape, tmp_path / "cache") == made
    assert (made / "tokenizer.json").stat().st_mtime_ns == stamp
    assert servable_directory(made, tmp_path / "other") == made
    assert not (shape / "tokenizer.json").exists()
    (shape / "config.json").write_text(json.dumps({"vocab_size": 500}))
    vocabulary = json.loads((servable_directory(shape, tmp_path / "cache") / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(vocabulary) == 500
