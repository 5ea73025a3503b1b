"""What random prompts are made of: token ids, or words that are one token each."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

from inference_service.config import Config, ConfigError
from inference_service.fetch import FetchError, resolve_model
from inference_service.loadtest import Workload
from loadgen._target import Model, TargetError

_WORD = re.compile(r"[A-Za-z]+")


def prompt_ids(workload: Workload, model: Model) -> list[int]:
    """The token ids of prompts. With a vocabulary of the settings' all targets get the same, whatever they know of their own."""
    vocab_size = workload.vocab_size
    if not model.vocab_size and not vocab_size:
        raise TargetError(f"loadtest.workload.vocab_size: the target of {model.name} does not tell its vocabulary's size, so set it here")
    if model.vocab_size and vocab_size > model.vocab_size:
        raise TargetError(f"loadtest.workload.vocab_size: {vocab_size}, but that of {model.name} is {model.vocab_size}")
    if vocab_size:
        return list(range(vocab_size))
    return [token_id for token_id in range(model.vocab_size) if token_id not in model.eos_token_ids]


def load_tokenizer(config: Config, workload: Workload) -> Tokenizer:
    """That of `workload.tokenizer`, else of model.path. Raises TargetError."""
    key, path = ("loadtest.workload.tokenizer", workload.tokenizer) if workload.tokenizer else ("model.path", config.model.path)
    try:
        directory = Path(path) if (Path(path) / "tokenizer.json").is_file() else resolve_model(path)
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    except ConfigError as error:
        raise TargetError(f"{key}: {str(error).removeprefix('model.path: ')}") from None
    except FetchError as error:
        raise TargetError(f"{key}: {error}") from None
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise TargetError(f"{key}: {path!r} has no tokenizer.json that can be read: {error}") from None


def words(tokenizer: Tokenizer) -> list[str]:
    """The words of plain letters that are one token each, at a text's beginning and after a space, so that N of them are N tokens.

    Raises TargetError for a tokenizer without any.
    """
    pieces = tokenizer.decode_batch([[token_id] for token_id in range(tokenizer.get_vocab_size())])
    candidates = sorted({piece.strip() for piece in pieces if _WORD.fullmatch(piece.strip())})
    texts = [f"{word} {word}" for word in candidates]
    encodings = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    decoded = tokenizer.decode_batch(encodings)
    found = [word for word, text, ids, again in zip(candidates, texts, encodings, decoded, strict=True) if len(ids) == 2 and again == text]
    if not found:
        raise TargetError("loadtest.workload.tokenizer: it has no word that is one token, so texts of exact lengths cannot be made")
    return found
