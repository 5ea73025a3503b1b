"""Turns a Llama GGUF file into a Hugging Face directory with bf16 weights: `python -m inference_service.convert_gguf FILE DIRECTORY`.

A program of its own, since it imports torch, which the process that asks for a model must not.
The file is read here and not by `transformers`, which rebuilds a GGUF tokenizer without its pre-tokenizer's digit splitting.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

CONTROL_TOKEN = 3
"""The GGUF token type of special tokens."""

PARAMETERS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def main(gguf_file: str, directory: str) -> None:
    reader = GGUFReader(gguf_file)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    if (architecture := facts["general.architecture"]) != "llama" or (pre := facts["tokenizer.ggml.pre"]) != "smollm":
        sys.exit(f"{gguf_file}: only Llama models with SmolLM's tokenizer can be converted, this is {architecture} with {pre}")
    weights = {parameter_name(tensor.name): weight(tensor, facts) for tensor in reader.tensors}
    out = Path(directory)
    (out / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    tokenizer(facts).save(str(out / "tokenizer.json"))
    write_json(out / "config.json", config(facts, tied="lm_head.weight" not in weights))
    write_json(out / "generation_config.json", special_ids(facts))
    write_json(out / "tokenizer_config.json", tokenizer_config(facts))


def parameter_name(gguf_name: str) -> str:
    """blk.7.attn_q.weight -> model.layers.7.self_attn.q_proj.weight."""
    *block, module, kind = gguf_name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{PARAMETERS[module]}.{kind}"


def weight(tensor: ReaderTensor, facts: dict[str, Any]) -> torch.Tensor:
    """The tensor in bf16, [out, in] as in PyTorch."""
    weight_OI = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    for module, heads in (("attn_q", "llama.attention.head_count"), ("attn_k", "llama.attention.head_count_kv")):
        if f".{module}." in tensor.name:
            weight_OI = unpermute(weight_OI, facts[heads])
    return weight_OI.bfloat16().contiguous()


def unpermute(weight_OI: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of each query and key head, since its RoPE turns neighbours; ours turns halves."""
    out, width = weight_OI.shape
    return weight_OI.view(heads, out // heads // 2, 2, width).transpose(1, 2).reshape(out, width)


def tokenizer(facts: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE in which each digit is a token."""
    tokens: list[str] = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    made.decoder = decoders.ByteLevel()
    types = facts["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return made


def config(facts: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // heads,
        "rms_norm_eps": round(facts["llama.attention.layer_norm_rms_epsilon"], 10),
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": facts["llama.vocab_size"],
        **special_ids(facts),
    }


def special_ids(facts: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {ours: facts[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in names.items()}


def tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        # Any other class would build its own pre-tokenizer in place of tokenizer.json's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{ours: tokens[facts[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
        "add_bos_token": facts["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": facts["tokenizer.ggml.add_space_prefix"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
