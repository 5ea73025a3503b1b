"""Our forward against transformers, on tiny random checkpoints of each family, however the tokens are cut into steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from inference_service.config import Kernels
from inference_service.engine.step import Row, StepPlan
from inference_service.execution.batch import InputBuffers, pack
from inference_service.kernels.attention import AttentionSpec
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import Setting
from inference_service.messages import Sampling
from inference_service.models.build import Build
from inference_service.models.checkpoint import load_checkpoint
from inference_service.models.config_json import ModelError
from inference_service.models.decoder import Decoder
from inference_service.models.families import FAMILIES, make_model, read_config
from inference_service.models.rotary import RopeConfig

CPU = torch.device("cpu")
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
CONFIGS = Path(__file__).parents[2] / "configs" / "models"
SMALL: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MOE: dict[str, Any] = {"head_dim": 24, "num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}


def llama(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**(SMALL | {"head_dim": 24} | changes))


def qwen3_moe(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3MoeConfig(**(SMALL | MOE | changes))


def qwen2_moe(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen2MoeConfig(**(SMALL | MOE | {"shared_expert_intermediate_size": 40} | changes))


WINDOW = 20
"""Less than the contexts of the tests."""


def gemma2(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(**(SMALL | {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 40} | changes))


def gemma3(**changes: Any) -> transformers.PretrainedConfig:
    fields = {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 40, "num_hidden_layers": 4, "sliding_window_pattern": 3}
    return transformers.Gemma3TextConfig(**(SMALL | fields | changes))


def qwen2(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen2Config(**(SMALL | changes))


def qwen3(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(**(SMALL | {"head_dim": 24} | changes))


def mixtral(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.MixtralConfig(**(SMALL | {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2} | changes))


def phi3(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Phi3Config(**(SMALL | {"pad_token_id": 0, "original_max_position_embeddings": 256} | changes))


def olmo2(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.Olmo2Config(**(SMALL | changes))


def longrope(pairs: int, **changes: Any) -> dict[str, Any]:
    """A factor for each pair of dimensions, and the long ones unlike the short ones."""
    factors = {"short_factor": [1 + pair / 4 for pair in range(pairs)], "long_factor": [2.0 + pair for pair in range(pairs)]}
    return {"rope_type": "longrope", "rope_theta": 10_000.0} | factors | changes


def gpt_oss(**changes: Any) -> transformers.PretrainedConfig:
    small = SMALL | {"head_dim": 24, "intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW}
    return transformers.GptOssConfig(**(small | {"swiglu_limit": 0.4} | changes))


MLA: dict[str, Any] = {"num_key_value_heads": 6, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20}
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2}
DEEPSEEK_YARN: dict[str, Any] = {"rope_theta": 1e4, **YARN, "mscale": 0.707, "mscale_all_dim": 1.0}


def deepseek_v2(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.DeepseekV2Config(**(SMALL | MLA | DEEPSEEK | {"q_lora_rank": None} | changes))


def deepseek_v3(**changes: Any) -> transformers.PretrainedConfig:
    return transformers.DeepseekV3Config(**(SMALL | MLA | DEEPSEEK | GROUPS | {"q_lora_rank": 40} | changes))


CASES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: llama(tie_word_embeddings=False),
    "llama-tied": lambda: llama(tie_word_embeddings=True, head_dim=None),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama3-rope": lambda: llama(rope_parameters={"rope_theta": 50_000.0, **LLAMA3}),
    "linear-rope": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    "one-head-each": lambda: llama(num_key_value_heads=6),
    "qwen3-moe": lambda: qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-plain": lambda: qwen3_moe(norm_topk_prob=False, tie_word_embeddings=True),
    "qwen3-moe-mixed": lambda: qwen3_moe(norm_topk_prob=True, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1]),
    "qwen2": lambda: qwen2(),
    "qwen2-yarn": lambda: qwen2(tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6, **YARN}),
    "qwen2-windows": lambda: qwen2(use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: qwen3(tie_word_embeddings=True),
    "qwen3-yarn": lambda: qwen3(rope_parameters={"rope_theta": 1e4, **YARN, "truncate": False, "attention_factor": 1.3, "beta_fast": 4.0}),
    "mixtral": lambda: mixtral(),
    "mixtral-window": lambda: mixtral(sliding_window=WINDOW, tie_word_embeddings=True),
    "phi3": lambda: phi3(sliding_window=WINDOW),
    "phi3-longrope": lambda: phi3(rope_parameters=longrope(8, factor=4.0)),
    "phi3-partial": lambda: phi3(tie_word_embeddings=True, rope_parameters=longrope(6, factor=4.0, partial_rotary_factor=0.75)),
    "olmo2": lambda: olmo2(),
    "olmo2-tied": lambda: olmo2(tie_word_embeddings=True, attention_bias=True, num_key_value_heads=6),
    "qwen2-moe": lambda: qwen2_moe(num_key_value_heads=6),
    "qwen2-moe-mixed": lambda: qwen2_moe(norm_topk_prob=True, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[1]),
    "qwen2-moe-unbiased": lambda: qwen2_moe(qkv_bias=False, tie_word_embeddings=True),
    "gemma2": lambda: gemma2(attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma2-no-caps": lambda: gemma2(attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False),
    "gemma3": lambda: gemma3(),
    "gemma3-scaled": lambda: gemma3(rope_scaling={"rope_type": "linear", "factor": 8.0}, rope_theta=3e4, rope_local_base_freq=100.0),
    "gpt-oss": lambda: gpt_oss(),
    "deepseek-v2-lite": lambda: deepseek_v2(rope_parameters=DEEPSEEK_YARN),
    "deepseek-v2": lambda: deepseek_v2(q_lora_rank=40, topk_method="group_limited_greedy", **GROUPS, routed_scaling_factor=2.0),
    "deepseek-v3": lambda: deepseek_v3(rope_parameters={**DEEPSEEK_YARN, "mscale": 1.0}, routed_scaling_factor=0.8),
    "deepseek-v3-plain": lambda: deepseek_v3(rope_interleave=False, norm_topk_prob=False, tie_word_embeddings=True),
    "moonlight": lambda: deepseek_v3(q_lora_rank=None, n_group=1, topk_group=1, routed_scaling_factor=2.446, rms_norm_eps=1e-5),
}


def save_random(config: transformers.PretrainedConfig, model_dir: Path, std: float = 0.08, shard: str = "1GB") -> Any:
    """Write a checkpoint with weights of `std`, norms near 1 and small biases, and give the transformers model."""
    torch.manual_seed(0)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0, 0.1) if name.endswith("norm.weight") else weight.normal_(0.0, std)
        for name, values in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                values.normal_(0.0, 0.3)
    model.save_pretrained(model_dir, max_shard_size=shard)
    return model


def setting(architecture: str, dtype: torch.dtype) -> Setting:
    return Setting(architecture, dtype, head_dim=24, group=3, page_size=16)


def load(model_dir: Path, dtype: torch.dtype = torch.float32, kernels: Kernels | None = None, max_context: int = 0) -> Decoder:
    operators = make_operators(select(kernels or Kernels(), setting("x86_64", dtype)))
    config = read_config(model_dir)
    config = replace(config, max_context=max_context or config.max_context)
    model = make_model(Build(operators, dtype, CPU), config)
    load_checkpoint(model_dir, model.weights(), config.tied_embeddings, config.unused)
    model.pack()
    return model


class Runner:
    """Steps of hand-made rows; the pages of the sequences are interleaved, so that none is contiguous."""

    def __init__(self, model: Decoder, page_size: int, sequences: int = 4) -> None:
        pages_each = -(-model.config.max_context // page_size)
        self.model, self.page_size = model, page_size
        self.pages = [list(range(slot, sequences * pages_each, sequences))[::-1] for slot in range(sequences)]
        self.caches = model.new_cache(sequences * pages_each, page_size, CPU)
        self.buffers = InputBuffers(sequences, 512, pages_each, CPU)
        self.computed = [0] * sequences

    def step(self, chunks: dict[int, list[int]], decodes: dict[int, int] | None = None) -> Tensor:
        """Compute tokens of sequences by slot: one decode each, then chunks. Gives all tokens' logits."""
        rows = []
        for slot, token in (decodes or {}).items():
            self.buffers.last_token_id_S[slot] = token
            rows.append(self._row(slot, 1, []))
        rows += [self._row(slot, len(ids), ids) for slot, ids in chunks.items()]
        with torch.inference_mode():
            step = self.buffers.fill(pack(StepPlan(rows), self.page_size))
            return self.model.forward(step.tensors.token_ids_T, step.layout(), self.caches, None)

    def _row(self, slot: int, length: int, ids: list[int]) -> Row:
        start = self.computed[slot]
        self.computed[slot] += length
        return Row(slot, start, length, ids, self.pages[slot], True, GREEDY)


def reference_logits(reference: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def random_ids(count: int, seed: int = 1) -> list[int]:
    ids: list[int] = torch.randint(0, SMALL["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours.float() - theirs.float()).abs().max() < 1e-4


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    model_dir = tmp_path_factory.mktemp(request.param)
    return model_dir, save_random(CASES[request.param](), model_dir, shard="100KB" if request.param == "qwen3-moe" else "1GB")


@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_chunked_prefill_gives_the_logits_of_transformers(checkpoint: tuple[Path, Any], page_size: int) -> None:
    model_dir, reference = checkpoint
    ids = random_ids(70)
    runner = Runner(load(model_dir), page_size)
    pieces = [runner.step({2: ids[first:last]}) for first, last in [(0, 33), (33, 34), (34, 70)]]
    theirs = reference_logits(reference, ids)
    assert theirs.std() > 0.05
    assert_close(torch.cat(pieces), theirs)


def test_mixed_steps_give_the_logits_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    model_dir, reference = checkpoint
    sequences = [random_ids(count, seed) for seed, count in enumerate((90, 12, 41, 7))]
    expected = [reference_logits(reference, ids) for ids in sequences]
    runner = Runner(load(model_dir), 4)
    runner.step({0: sequences[0][:80]})
    runner.step({1: sequences[1][:3], 2: sequences[2][:20]})
    # Contexts of 81, 4 and 21 tokens decode together: of unlike length, so in more than one group.
    logits = runner.step({3: sequences[3][:5]}, {0: sequences[0][80], 1: sequences[1][3], 2: sequences[2][20]})
    assert_close(logits, torch.cat([expected[0][80:81], expected[1][3:4], expected[2][20:21], expected[3][:5]]))
    logits = runner.step({2: sequences[2][21:41], 0: sequences[0][81:82]}, {1: sequences[1][4], 3: sequences[3][5]})
    assert_close(logits, torch.cat([expected[1][4:5], expected[3][5:6], expected[2][21:41], expected[0][81:82]]))


def test_greedy_tokens_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    model_dir, reference = checkpoint
    prompt = random_ids(23, seed=3)
    theirs = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 23, dtype=torch.long), do_sample=False, min_new_tokens=32, max_new_tokens=32
    )[0, 23:].tolist()
    runner = Runner(load(model_dir), 16)
    ours = [int(runner.step({1: prompt})[-1].argmax())]
    while len(ours) < 32:
        ours.append(int(runner.step({}, {1: ours[-1]})[-1].argmax()))
    assert ours == theirs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float32(checkpoint: tuple[Path, Any], dtype: torch.dtype) -> None:
    model_dir, reference = checkpoint
    ids = random_ids(48)
    runner = Runner(load(model_dir, dtype), 16)
    ours = torch.cat([runner.step({0: ids[:40]}), *(runner.step({}, {0: token}) for token in ids[40:])])
    theirs = reference_logits(reference, ids)
    assert ours.dtype == dtype
    assert ((ours.float() - theirs).norm() / theirs.norm()) < 0.05


def test_backends_agree(checkpoint: tuple[Path, Any]) -> None:
    ids = random_ids(30)
    plain, packed = (Runner(load(checkpoint[0], kernels=Kernels(gemm=gemm)), 16).step({0: ids}) for gemm in ("torch", "onednn"))
    assert_close(plain, packed)


def test_published_shapes_have_their_published_size() -> None:
    sizes = {}
    for name in sorted(path.name for path in CONFIGS.iterdir()):
        config = replace(read_config(CONFIGS / name), max_context=8)
        build = Build(make_operators(select(Kernels(), setting("sm_90", torch.bfloat16))), torch.bfloat16, torch.device("meta"))
        sizes[name] = sum(weight.numel() for weight in make_model(build, config).weights().values())
    assert sizes == {
        "deepseek-v2-lite": 15_706_484_224,
        "gemma-2-2b": 2_614_341_888,
        "gemma-3-1b": 999_885_952,
        "gpt-oss-20b": 20_914_757_184,
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen1.5-moe-a2.7b": 14_315_784_192,
        "llama-3.1-8b": 8_030_261_248,
        "moonlight-16b-a3b": 15_960_110_208,
        "smollm2-135m": 134_515_008,
    }


def test_longrope_takes_its_factors_by_the_longest_context(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Long ones for all sequences where the context may exceed the original one, as transformers does for those that exceed it."""
    reference = save_random(phi3(original_max_position_embeddings=32, rope_parameters=longrope(8)), tmp_path)
    ids = random_ids(70)
    runner = Runner(load(tmp_path), 16)
    assert_close(torch.cat([runner.step({0: ids[:20]}), runner.step({0: ids[20:]})]), reference_logits(reference, ids))
    assert "32 or less" in caplog.text
    assert_close(Runner(load(tmp_path, max_context=32), 16).step({0: ids[:32]}), reference_logits(reference, ids[:32]))


def write_config(model_dir: Path, **changes: Any) -> Path:
    raw = json.loads((CONFIGS / "smollm2-135m" / "config.json").read_text()) | changes
    (model_dir / "config.json").write_text(json.dumps(raw))
    return model_dir


def test_both_forms_of_rope_settings_mean_the_same(tmp_path: Path) -> None:
    old = read_config(write_config(tmp_path, rope_theta=7e4, rope_scaling=LLAMA3)).rope
    new = read_config(write_config(tmp_path, rope_theta=None, rope_scaling=None, rope_parameters={"rope_theta": 7e4, **LLAMA3})).rope
    assert old == new
    assert (old.theta, old.kind, old.factor) == (7e4, "llama3", 8.0)
    assert read_config(write_config(tmp_path, rope_scaling={"type": "linear", "factor": 2.0})).rope.factor == 2.0


def test_published_configurations_say_how_each_layer_attends() -> None:
    caps, local, small = (read_config(CONFIGS / name) for name in ("gemma-2-2b", "gemma-3-1b", "gpt-oss-20b"))
    assert [caps.attention_of(layer)[0] for layer in (0, 1)] == [AttentionSpec(1 / 16, 50.0, 4096), AttentionSpec(1 / 16, 50.0)]
    assert (caps.logits_soft_cap, caps.tied_embeddings, caps.embedding_scale) == (30.0, True, 48.0)
    assert [layer for layer in range(26) if local.attention_of(layer) == (AttentionSpec(1 / 16), RopeConfig(1e6))] == [5, 11, 17, 23]
    assert local.attention_of(4) == (AttentionSpec(1 / 16, window=512), RopeConfig(1e4))
    assert sorted(small.sliding_layers) == list(range(0, 24, 2)) and small.attention_of(0)[0] == AttentionSpec(window=128)
    assert (small.rope.kind, small.rope.factor, small.rope.truncate, small.dtype) == ("yarn", 32.0, False, torch.bfloat16)
    # A window that no sequence can leave needs no kernel that knows windows.
    assert replace(caps, max_context=4096).attention_of(0)[0] == AttentionSpec(1 / 16, 50.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["architecture", "MambaForCausalLM", ", ".join(FAMILIES)]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, ["rope scaling", "dynamic", "default, linear, llama3, yarn, longrope"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope scaling", "yarn", "factor"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "four"}}, ["rope scaling", "yarn", "four"]),
        ({"rope_scaling": longrope(30, original_max_position_embeddings=64)}, ["longrope", "short_factor", "32 entries"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"architectures": ["Qwen3MoeForCausalLM"], "use_sliding_window": True}, ["use_sliding_window"]),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": -1}, ["sliding_window", "-1"]),
        ({"architectures": ["MixtralForCausalLM"]}, ["num_local_experts"]),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}, ["num_experts_per_tok 3", "2"]),
        ({"architectures": ["Qwen2MoeForCausalLM"], **MOE}, ["shared_expert_intermediate_size"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, ["llama3", "low_freq_factor"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers", "many"]),
        ({"num_key_value_heads": 2}, ["num_attention_heads 9", "num_key_value_heads 2"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8", "bfloat16"]),
    ],
)
def test_an_unsupported_model_is_refused_by_field(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as refusal:
        read_config(write_config(tmp_path, **changes))
    assert all(word in str(refusal.value) for word in ["config.json", *words])
