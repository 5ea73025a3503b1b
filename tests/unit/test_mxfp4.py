"""GPT-OSS as it is published, its experts in MXFP4, against transformers' own reading of the blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from inference_service.models.config_json import ModelError
from inference_service.models.families import read_config
from tests.unit.test_models import Runner, assert_close, gpt_oss, load, random_ids, reference_logits, save_random

METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]}


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Any, dict[str, Tensor]]:
    """A checkpoint in the published layout, the transformers model that it means, and its tensors."""
    reference = save_random(gpt_oss(num_hidden_layers=2), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tensors = dict(reference.state_dict())
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        reference.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write(tmp_path, tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": METHOD}))
    return tmp_path, reference, tensors


def write(model_dir: Path, tensors: dict[str, Tensor]) -> None:
    """Scales lie in another file than their blocks, as they may where a file ends between the two."""
    scales = {name: weight.contiguous() for name, weight in tensors.items() if name.endswith("_scales")}
    save_file({name: weight.contiguous() for name, weight in tensors.items() if name not in scales}, model_dir / "model-1.safetensors")
    save_file(scales, model_dir / "model-2.safetensors")


def test_blocks_and_scales_mean_what_transformers_reads(published: tuple[Path, Any, dict[str, Tensor]]) -> None:
    model_dir, reference, _ = published
    ids = random_ids(60)
    runner = Runner(load(model_dir), 16)
    ours = torch.cat([runner.step({0: ids[:50]}), *(runner.step({}, {0: token}) for token in ids[50:])])
    theirs = reference_logits(reference, ids)
    assert theirs.std() > 0.05
    assert_close(ours, theirs)


def test_each_value_is_exact_in_bfloat16(published: tuple[Path, Any, dict[str, Tensor]]) -> None:
    model_dir, reference, _ = published
    weights = load(model_dir, torch.bfloat16).weights()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(weights[name].float(), reference.get_parameter(name))


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(published: tuple[Path, Any, dict[str, Tensor]]) -> None:
    model_dir, _, tensors = published
    name = "model.layers.0.mlp.experts.down_proj"
    write(model_dir, {key: weight for key, weight in tensors.items() if key != f"{name}_scales"})
    with pytest.raises(ModelError, match=rf"model-1\.safetensors: holds {name}_blocks, but no file holds {name}_scales"):
        load(model_dir)
    write(model_dir, tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, 1:]})
    with pytest.raises(ModelError, match=rf"model-2\.safetensors: {name}_scales has shape"):
        load(model_dir)
    write(model_dir, tensors | {f"{name}_scales": tensors[f"{name}_scales"].float()})
    with pytest.raises(ModelError, match=rf"model-2\.safetensors: {name}_scales has dtype F32"):
        load(model_dir)
    write(model_dir, tensors | {f"{name}_{part}": tensors[f"{name}_{part}"][:, 1:] for part in ("blocks", "scales")})
    with pytest.raises(ModelError, match=rf"{name} has shape \(6, 32, 95\), but config\.json says \(6, 32, 96\)"):
        load(model_dir)


def test_another_quantization_is_refused(published: tuple[Path, Any, dict[str, Tensor]]) -> None:
    config = published[0] / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match=r"config\.json: quantization_config: quant_method 'fp8'"):
        read_config(published[0])
