"""FP8 checkpoints against transformers in float32 on the dequantized weights, and quantization at load; and a cache in FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_service.config import ConfigError, Kernels, load_config
from inference_service.execution.loading import apply_config
from inference_service.execution.page_copies import copy_pages
from inference_service.kernels import support, versions
from inference_service.kernels.fp8 import BLOCK, E4M3, BlockFp8, quantize
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import Setting
from inference_service.models.build import Build
from inference_service.models.checkpoint import load_checkpoint
from inference_service.models.config_json import ModelError
from inference_service.models.decoder import Decoder
from inference_service.models.dummy import fill_dummy
from inference_service.models.experts import Fp8Experts
from inference_service.models.families import make_model, read_config
from inference_service.models.fp8 import SCALES, in_fp8
from inference_service.models.linear import Fp8Linear
from tests.unit.test_models import (
    CPU,
    Runner,
    assert_close,
    deepseek_v3,
    llama,
    mixtral,
    phi3,
    qwen2_moe,
    qwen3_moe,
    random_ids,
    reference_logits,
    save_random,
    setting,
)

METHOD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LATENTS: dict[str, Any] = {"kv_lora_rank": 48, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 32}
CASES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: llama(hidden_size=156, intermediate_size=200, attention_bias=True, mlp_bias=True),
    "qwen3-moe": lambda: qwen3_moe(hidden_size=264, moe_intermediate_size=128, norm_topk_prob=True),
    "qwen2-moe": lambda: qwen2_moe(hidden_size=132, moe_intermediate_size=40, shared_expert_intermediate_size=136),
    "mixtral": lambda: mixtral(hidden_size=144),
    "phi3": lambda: phi3(hidden_size=144),
    "deepseek-v3": lambda: deepseek_v3(hidden_size=156, **LATENTS),
}
"""Sizes on both sides of a block, and few that are multiples of one."""


def save_fp8(config: transformers.PretrainedConfig, model_dir: Path, scales: torch.dtype = torch.float32) -> tuple[Any, dict[str, Tensor]]:
    """Write a checkpoint as published; give the transformers model with what its weights mean, and those by name."""
    reference = save_random(config, model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    meant = {}
    for name in [name for name in tensors if in_fp8(name) or name.endswith("kv_b_proj.weight")]:
        matrix = quantize(tensors[name])
        matrix = replace(matrix, scales=matrix.scales.to(scales))
        tensors |= {name: matrix.values, name + SCALES: matrix.scales}
        meant[name] = replace(matrix, scales=matrix.scales.float()).dequantize(torch.float32)
    plain = model_dir / "plain"
    reference.config.save_pretrained(plain)
    whole = {name: tensor for name, tensor in (tensors | meant).items() if not name.endswith(SCALES)}
    save_file(whole, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, model_dir / "model.safetensors")
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": METHOD}))
    models: Any = transformers.AutoModelForCausalLM
    return models.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval(), meant


def load(model_dir: Path, kept: bool = False, to_fp8: bool = False, pack: bool = True, kernels: Kernels | None = None) -> Decoder:
    """`kept`: weights stay in FP8, and each product dequantizes them anew."""
    config = read_config(model_dir)
    config = replace(config, fp8=config.fp8 or to_fp8)
    kernels = kernels or (Kernels(gemm_fp8="torch", moe_fp8="torch") if kept else Kernels())
    choices = select(kernels, replace(setting("x86_64", torch.float32), features=frozenset({support.FP8_WEIGHTS})))
    model = make_model(Build(make_operators(choices), torch.float32, CPU, config.fp8), config)
    load_checkpoint(model_dir, model.weights(), config.tied_embeddings, config.unused, to_fp8)
    if pack:
        model.pack()
    return model


@pytest.fixture(scope="module", params=CASES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model_dir = tmp_path_factory.mktemp(request.param)
    return model_dir, save_fp8(CASES[request.param](), model_dir)[0]


@pytest.mark.parametrize("kept", [False, True], ids=["dequantized", "kept"])
def test_logits_and_greedy_tokens_are_those_of_the_dequantized_weights(published: tuple[Path, Any], kept: bool) -> None:
    model_dir, reference = published
    ids = random_ids(40)
    runner = Runner(load(model_dir, kept), 16)
    ours = torch.cat([runner.step({0: ids[:30]}), *(runner.step({}, {0: token}) for token in ids[30:])])
    theirs = reference_logits(reference, ids)
    assert theirs.std() > 0.05
    assert_close(ours, theirs)
    greedy = reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, 40, dtype=torch.long), do_sample=False, min_new_tokens=32, max_new_tokens=32
    )[0, 40:].tolist()
    drawn = [int(ours[-1].argmax())]
    while len(drawn) < 32:
        drawn.append(int(runner.step({}, {0: drawn[-1]})[-1].argmax()))
    assert drawn == greedy


def test_experts_alone_are_kept(tmp_path: Path) -> None:
    """As on Hopper without a compiler for DeepGEMM."""
    reference, _ = save_fp8(CASES["qwen3-moe"](), tmp_path)
    model, ids = load(tmp_path, kernels=Kernels(moe_fp8="torch")), random_ids(20)
    layer: Any = model.layers[0]
    assert isinstance(layer.mlp.experts, Fp8Experts) and not isinstance(layer.attention.qkv, Fp8Linear)
    assert_close(Runner(model, 16).step({0: ids}), reference_logits(reference, ids))


def test_what_is_kept_is_what_the_checkpoint_has(published: tuple[Path, Any]) -> None:
    """And all that the rule by name says is in FP8."""
    model_dir, _ = published
    places, tensors = load(model_dir, kept=True, pack=False).weights(), load_file(model_dir / "model.safetensors")
    matrices = {name for name, place in places.items() if place.dtype == E4M3}
    assert matrices == {name for name in tensors if in_fp8(name)}
    assert {name + SCALES for name in matrices} == {name for name in places if name.endswith(SCALES)}
    for name in matrices:
        assert torch.equal(places[name].view(torch.uint8), tensors[name].view(torch.uint8)), name
        assert torch.equal(places[name + SCALES], tensors[name + SCALES]), name


def test_scales_in_bfloat16(tmp_path: Path) -> None:
    """As Qwen publishes them."""
    reference, _ = save_fp8(CASES["llama"](), tmp_path, torch.bfloat16)
    ids = random_ids(20)
    assert_close(Runner(load(tmp_path), 16).step({0: ids}), reference_logits(reference, ids))


@pytest.mark.parametrize("case", ["llama", "qwen2-moe", "mixtral", "deepseek-v3"])
def test_quantization_at_load_gives_what_a_quantized_checkpoint_does(case: str, tmp_path: Path) -> None:
    save_random(CASES[case](), tmp_path)
    (tmp_path / "quantized").mkdir()
    save_fp8(CASES[case](), tmp_path / "quantized")
    ids = random_ids(24)
    before = Runner(load(tmp_path), 16).step({0: ids})
    at_load = [Runner(load(tmp_path, kept, to_fp8=True), 16).step({0: ids}) for kept in (False, True)]
    assert_close(*at_load)
    error = float((at_load[0] - before).norm() / before.norm())
    assert 0.005 < error < 0.2
    if case != "deepseek-v3":  # whose kv_b_proj the published form has in FP8
        assert_close(at_load[0], Runner(load(tmp_path / "quantized"), 16).step({0: ids}))


def test_the_error_of_rounding_is_bounded() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[:128, :128] = 0
    matrix = quantize(weight)
    assert (matrix.values.shape, matrix.scales.shape) == ((300, 200), (3, 2))
    error = (matrix.dequantize(torch.float32) - weight).abs()
    scales = matrix.scales.repeat_interleave(BLOCK, 0)[:300].repeat_interleave(BLOCK, 1)[:, :200]
    assert (error <= torch.maximum(weight.abs() / 16, scales * 2**-10) * 1.001).all()
    assert quantize(torch.full((1, 1), 1e30)).dequantize(torch.float32).item() == pytest.approx(1e30)


def damaged(model_dir: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    save_fp8(CASES["llama"](), model_dir)
    tensors = load_file(model_dir / "model.safetensors")
    change(tensors)
    save_file(tensors, model_dir / "model.safetensors")


NAME = "model.layers.1.mlp.up_proj.weight"


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    damaged(tmp_path, lambda tensors: tensors.update({NAME + SCALES: tensors[NAME + SCALES][:1]}))
    with pytest.raises(ModelError, match=rf"{NAME + SCALES} has shape \(1, 2\), but {NAME} has \(2, 2\) blocks"):
        load(tmp_path)
    damaged(tmp_path, lambda tensors: tensors.__delitem__(NAME + SCALES))
    with pytest.raises(ModelError, match=rf"{NAME} has dtype F8_E4M3"):
        load(tmp_path)


def test_a_matrix_that_is_not_quantized_is_not_rounded_in_silence(tmp_path: Path) -> None:
    def plain(tensors: dict[str, Tensor]) -> None:
        tensors[NAME] = BlockFp8(tensors[NAME], tensors.pop(NAME + SCALES)).dequantize(torch.float32)

    damaged(tmp_path, plain)
    load(tmp_path)
    with pytest.raises(ModelError, match=rf"{NAME} has dtype F32, though .*quantization_config is fp8.*dequantized"):
        load(tmp_path, kept=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_other_quantizations_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = llama().to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": METHOD | changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"config.json: quantization_config: {words}"):
        read_config(tmp_path)


def test_quantization_of_what_is_quantized_is_refused(tmp_path: Path) -> None:
    save_fp8(CASES["llama"](), tmp_path)
    with pytest.raises(ConfigError, match=r"model\.quantization: the checkpoint is in FP8 already"):
        apply_config(read_config(tmp_path), load_config(None, ["model.quantization=fp8"]))
    assert apply_config(read_config(tmp_path), load_config()).fp8


def test_random_weights(tmp_path: Path) -> None:
    save_fp8(CASES["qwen3-moe"](), tmp_path)
    model = load(tmp_path, kept=True, pack=False)
    fill_dummy(model.weights())
    model.pack()
    mlp: Any = model.layers[0].mlp
    assert 9e-4 < mlp.experts.gate_up.dequantize(torch.float32).abs().max() <= 1.001e-3
    assert Runner(model, 16).step({0: random_ids(9)}).isfinite().all()


def test_the_support_table_chooses() -> None:
    def chosen(architecture: str, dtype: torch.dtype, *features: str) -> dict[str, tuple[str, str]]:
        versions = {"flashinfer": "0.6.13", "cuda": "13.0", "triton": "3.6", "nvcc": "13.0"}
        where = replace(setting(architecture, dtype), features=frozenset({support.FP8_WEIGHTS, *features}), versions=versions)
        return {choice.row.operator: (choice.row.backend, choice.reason) for choice in select(Kernels(), where)}

    hopper = chosen("sm_90", torch.bfloat16)
    assert (hopper["gemm_fp8"][0], hopper["moe_fp8"][0]) == ("triton+deepgemm", "triton") and "moe" not in hopper
    uneven = chosen("sm_90", torch.bfloat16, support.UNEVEN_HIDDEN)
    assert uneven["gemm_fp8"][0] == "triton+deepgemm" and uneven["moe_fp8"][0] == "dequantized" and "moe" in uneven
    for architecture, dtype in (("sm_80", torch.bfloat16), ("sm_100", torch.bfloat16), ("sm_90", torch.float16), ("x86_64", torch.float32)):
        backend, reason = chosen(architecture, dtype)["gemm_fp8"]
        assert backend == "dequantized" and "takes more memory, since gemm_fp8 by triton+deepgemm does not run" in reason
    versions = {"flashinfer": "0.6.13", "cuda": "12.6", "triton": "3.6"}
    old = replace(setting("sm_90", torch.bfloat16), features=frozenset({support.FP8_WEIGHTS}), versions=versions)
    assert all("needs cuda 12.8" in row.refusal(old) for row in support.rows("gemm_fp8")[:2])
    backends = {choice.row.operator: choice.row.backend for choice in select(Kernels(), old)}
    assert (backends["gemm_fp8"], backends["moe_fp8"]) == ("dequantized", "triton")
    images = replace(old, versions=versions | {"cuda": "13.0"})
    assert all("needs nvcc 12.8 or newer, which is not there" in row.refusal(images) for row in support.rows("gemm_fp8")[:2])


def test_the_nvcc_that_deep_gemm_would_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRTLLM_DG_NVCC_COMPILER", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    version = versions._nvcc_version.__wrapped__
    assert version() == ""
    (tmp_path / "bin").mkdir()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.9, V12.9.41'\n")
    nvcc.chmod(0o755)
    assert version() == "12.9"


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference).norm() / reference.norm())


interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these kernels on the GPU")


@pytest.mark.parametrize("fp8", [False, True])
def test_a_random_checkpoint_can_be_loaded_and_spreads_its_tokens(fp8: bool, tmp_path: Path) -> None:
    from benchmarks.random_checkpoint import write

    save_random(CASES["qwen3-moe"](), tmp_path / "shape")
    write(str(tmp_path / "shape"), tmp_path / "random", fp8, shard_gib=0.001)
    assert len(list((tmp_path / "random").glob("*.safetensors"))) > 1
    model = load(tmp_path / "random", kept=fp8)
    assert Runner(model, 16).step({0: random_ids(60)}).isfinite().all()
    assert all(len(set(ids_TK.flatten().tolist())) == 12 for ids_TK in model.take_chosen_experts())


def test_a_cache_in_fp8(tmp_path: Path) -> None:
    """Rounds keys and values as E4M3 does, in prefills and decodes alike, and otherwise changes nothing."""
    save_random(llama(hidden_size=144, num_key_value_heads=2), tmp_path)
    ids, config = random_ids(40), replace(read_config(tmp_path))
    model = make_model(Build(make_operators(select(Kernels(), setting("x86_64", torch.float32))), torch.float32, CPU), config)
    load_checkpoint(tmp_path, model.weights())
    model.pack()
    plain, rounded = Runner(model, 16), Runner(model, 16)
    pages, page_size = len(plain.caches[0]), 16
    rounded.caches = model.new_cache(pages, page_size, CPU, E4M3)
    found = []
    for runner in (plain, rounded):
        found.append(torch.cat([runner.step({0: ids[:20]}), runner.step({0: ids[20:30]}), *(runner.step({}, {0: id}) for id in ids[30:])]))
    assert 0.001 < error(found[1], found[0]) < 0.1
    first = plain.caches[0].clamp(-448, 448).to(E4M3)
    assert torch.equal(first.view(torch.uint8), rounded.caches[0].view(torch.uint8))
    copy_pages(rounded.caches, [(rounded.pages[0][0], 0)])
    assert torch.equal(rounded.caches[0][0].float(), rounded.caches[0][rounded.pages[0][0]].float())


@interpreted
@pytest.mark.usefixtures("loop_bounds")
def test_own_attention_and_append_with_a_cache_in_fp8() -> None:
    """As the references, on the same cache."""
    pytest.importorskip("triton")
    from inference_service.kernels.attention import StepLayout
    from inference_service.kernels.attention_mixed import TorchPagedAttention, TritonPagedAttention
    from inference_service.kernels.kv_append import KvAppend, TorchKvAppend, TritonKvAppend

    generator = torch.Generator().manual_seed(0)
    positions, rows, pages = torch.tensor([0, 37, 16]), torch.tensor([0, 1, 1]), torch.arange(6).view(2, 3)
    layout = StepLayout(0, [1, 2], [1, 38], positions, rows, pages, torch.tensor([1, 38]))
    qkv, table = torch.randn(3, 10, 64, generator=generator) * 100, torch.randn(48, 64, generator=generator)
    cache = torch.randn(6, 2, 2, 16, 64, generator=generator).to(E4M3)
    results = []
    appends: tuple[KvAppend, ...] = (TorchKvAppend(), TritonKvAppend())
    for append in appends:
        kv = cache.clone()
        results.append((append(qkv.clone(), None, kv, append.plan(layout, kv, table)).contiguous(), kv))
    (wanted_q, wanted_kv), (q, kv) = results
    assert error(q, wanted_q) < 1e-6
    # Rounding may go the other way where float32 differs in its last bit.
    assert (kv.float() != wanted_kv.float()).float().mean() < 1e-3 and kv.float().isfinite().all()
    q = torch.randn(3, 6, 64, generator=generator)
    ours, wanted = (attention(q, cache, attention.plan(layout, cache, 6)) for attention in (TritonPagedAttention(), TorchPagedAttention()))
    assert error(ours, wanted) < 1e-5


def test_where_a_cache_in_fp8_runs(tmp_path: Path) -> None:
    versions = {"flashinfer": "0.6.13", "cuda": "13.0", "triton": "3.6"}
    here = Setting("sm_90", torch.bfloat16, 128, 8, 64, versions, frozenset({support.FP8_CACHE}))
    chosen = {choice.row.operator: choice.row.backend for choice in select(Kernels(), here)}
    assert chosen["attention_decode"] == "triton" and chosen["attention_prefill"] == "fa2" and chosen["attention_mixed"] == "triton"
    assert not next(row for row in support.rows("attention_decode") if row.backend == "xqa").refusal(here)
    old = replace(here, architecture="sm_80")
    assert "sm_89" in next(row for row in support.rows("kv_append") if row.backend == "triton").refusal(old)
    save_random(deepseek_v3(), tmp_path)
    with pytest.raises(ConfigError, match=r"cache\.dtype: fp8 is not supported for DeepseekV3ForCausalLM"):
        apply_config(read_config(tmp_path), load_config(None, ["cache.dtype=fp8"]))
