"""Makes tokenizer.json from a model's other tokenizer files: `python -m inference_service.convert_tokenizer VOCABULARY OUT`.

VOCABULARY is a SentencePiece model, tiktoken ranks, or vocab.json with its merges.txt; its directory's JSON files are read too. The
conversion is `transformers`' own, and never runs code of the model's. What is made is compared with the vocabulary, id by id.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_service.text.detokenizer import byte_alphabet

_RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
UNIGRAM = 1
"""SentencePiece's number for the kind of model."""


@dataclass(frozen=True)
class Vocabulary:
    """What a vocabulary file says by itself."""

    file: Path
    kind: str
    """The model of the `tokenizers` library: BPE or Unigram."""
    ids: dict[str, int]
    loaders: tuple[str, ...]
    """Classes of `transformers` to load it with, the best first."""


def main(vocabulary_file: Path, out: Path) -> None:
    """Write tokenizer.json, and special_tokens_map.json with the tokens by role. Ends with one line for what cannot be converted."""
    # Its reader would keep files by path, and so give a changed one's old content.
    os.environ["TIKTOKEN_CACHE_DIR"] = ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Tokenizers need none, and it takes seconds to import.
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        vocabulary = read_vocabulary(vocabulary_file)
        tokenizer = convert(vocabulary)
    except (ValueError, OSError) as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    roles = {role: str(token) for role, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)}
    (out / "special_tokens_map.json").write_text(json.dumps(roles, indent=2) + "\n")


def read_vocabulary(file: Path) -> Vocabulary:
    """Raises ValueError for a file that is none."""
    if file.suffix == ".json":
        return Vocabulary(file, "BPE", json.loads(file.read_bytes()), ("AutoTokenizer", "GPT2Tokenizer"))
    content = file.read_bytes()
    if _RANKS.match(content):
        return _ranks(file, content)
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]
    except DecodeError:
        model = None
    if model is None or not model.pieces:
        raise ValueError("it is neither a SentencePiece model nor a list of tiktoken ranks")
    kind = "Unigram" if model.trainer_spec.model_type == UNIGRAM else "BPE"
    ids = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    return Vocabulary(file, kind, ids, ("AutoTokenizer", "PreTrainedTokenizerFast"))


def _ranks(file: Path, content: bytes) -> Vocabulary:
    """A line a token: its bytes in base 64, and its rank. The rest of such a tokenizer is code, but for Llama 3's, which is known."""
    config = _read_json(file.with_name("config.json"))
    if config.get("model_type") != "llama":
        raise ValueError(
            f"its ranks do not say how text is split, which is known for Llama 3 (model_type llama) and not for "
            f"{config.get('model_type')!r}; a tokenizer.json is needed"
        )
    if not _read_json(file.with_name("tokenizer_config.json")).get("added_tokens_decoder"):
        raise ValueError("its ranks hold no special tokens; tokenizer_config.json must list them as added_tokens_decoder")
    characters = {byte: character for character, byte in byte_alphabet().items()}
    ids = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ids["".join(characters[byte] for byte in base64.b64decode(token, validate=True))] = int(rank)
        except ValueError:
            raise ValueError(f"line {number} is no tiktoken rank") from None
    return Vocabulary(file, "BPE", ids, ("AutoTokenizer",))


def convert(vocabulary: Vocabulary) -> Any:
    """The tokenizer of `transformers` that has the vocabulary's ids. Raises ValueError where none has."""
    import transformers

    if vocabulary.file.suffix == ".tiktoken":
        vocabulary.file.rename(vocabulary.file.with_name("tiktoken.model"))
    problems = []
    for loader in vocabulary.loaders:
        # A class named here passes over the one that the JSON files name, which may be unable to read this vocabulary.
        try:
            tokenizer = getattr(transformers, loader).from_pretrained(str(vocabulary.file.parent), trust_remote_code=False)
        except Exception as error:  # whatever `transformers` and the libraries below it raise
            problems.append(f"{loader}: {error}")
            continue
        if not (problem := _difference(vocabulary, tokenizer)):
            return tokenizer
        problems.append(f"{type(tokenizer).__name__} {problem}")
    raise ValueError("; ".join(problems))


def _difference(vocabulary: Vocabulary, tokenizer: Any) -> str:
    kind = type(tokenizer.backend_tokenizer.model).__name__
    if kind != vocabulary.kind:
        return f"takes it for {kind}, and it is {vocabulary.kind}"
    ids = tokenizer.get_vocab()
    different = next((token for token, token_id in vocabulary.ids.items() if ids.get(token) != token_id), None)
    return "" if different is None else f"gives {different!r} the id {ids.get(different)}, not {vocabulary.ids[different]}"


def _read_json(file: Path) -> dict[str, Any]:
    content = json.loads(file.read_bytes()) if file.is_file() else {}
    return content if isinstance(content, dict) else {}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
