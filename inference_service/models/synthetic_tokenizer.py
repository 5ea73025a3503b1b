"""A byte-level tokenizer of any vocabulary size, for published shapes that come without one. Imports no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from inference_service.models.config_json import read_json


def servable_directory(model_dir: Path, cache_dir: Path) -> Path:
    """A directory that has a tokenizer: `model_dir` itself, or a copy of its JSON files with a synthetic tokenizer under `cache_dir`.

    The copy is kept, and made anew when config.json has changed. Other engines can serve it too, with their dummy weights.
    """
    if any((model_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return model_dir
    target = cache_dir / model_dir.resolve().name
    if (target / "tokenizer.json").exists() and (target / "config.json").read_bytes() == (model_dir / "config.json").read_bytes():
        return target
    target.mkdir(parents=True, exist_ok=True)
    for file in model_dir.glob("*.json"):
        shutil.copyfile(file, target / file.name)
    write_tokenizer(target)
    return target


def write_tokenizer(model_dir: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json beside config.json.

    Ids 0 to 255 are the bytes, so that any text is encoded a byte a token; every further id decodes to a word of its own, " w300".
    bos and eos are special tokens and have no text.
    """
    raw = read_json(model_dir)
    size = raw["vocab_size"]
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {f"Ġw{index}": index for index in range(len(vocabulary), size)}
    words = {index: word for word, index in vocabulary.items()}
    special = {}
    for role in ("bos", "eos"):
        ids = raw.get(f"{role}_token_id")
        index = ids[0] if isinstance(ids, list) else ids
        # An id among the bytes stays a byte: without it some text could not be encoded.
        if index is not None and index >= 256:
            special[f"{role}_token"] = f"<|{role}|>"
            vocabulary.pop(words[index], None)
            words[index] = special[f"{role}_token"]
            vocabulary[words[index]] = index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": raw.get("max_position_embeddings", 2048),
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    partial = model_dir / "tokenizer.json.partial"
    tokenizer.save(str(partial))
    partial.rename(model_dir / "tokenizer.json")
