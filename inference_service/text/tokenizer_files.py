"""Where a model's tokenizer.json is: in its directory, or made once from its other tokenizer files and kept in the cache."""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from inference_service.fetch import cache_directory

log = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json")
"""What tokenizer.json can be made from; the first that is there counts."""
_READ_TOO = ("merges.txt", "config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class TokenizerError(ValueError):
    """The model's directory has no usable tokenizer; the message names the file."""


def tokenizer_directory(model_dir: Path) -> Path:
    """The directory that holds the model's tokenizer.json: `model_dir` wherever it has one, else one of the cache.

    A conversion is kept by the content of the files that it reads, so that a changed file is converted anew. Raises TokenizerError.
    """
    if (model_dir / "tokenizer.json").is_file():
        return model_dir
    vocabulary = _vocabulary(model_dir)
    files = [vocabulary, *(file for name in _READ_TOO if (file := model_dir / name).is_file())]
    directory = cache_directory() / "tokenizers" / _digest(files)
    if not directory.is_dir():
        log.info("making tokenizer.json from %s", vocabulary)
        try:
            _convert(files, directory)
        except OSError as error:
            raise TokenizerError(f"{vocabulary}: its conversion cannot be kept: {error}; INFERENCE_SERVICE_CACHE sets where") from None
    return directory


def _vocabulary(model_dir: Path) -> Path:
    file = next((file for pattern in VOCABULARIES for file in sorted(model_dir.glob(pattern))), None)
    if file is None:
        raise TokenizerError(
            f"{model_dir / 'tokenizer.json'}: no such file, nor tokenizer.model (SentencePiece or tiktoken), a .tiktoken file, "
            "or vocab.json with merges.txt"
        )
    if file.name == "vocab.json" and not (model_dir / "merges.txt").is_file():
        raise TokenizerError(f"{model_dir / 'merges.txt'}: no such file, which vocab.json needs")
    return file


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256(f"{version('inference-service')} {version('transformers')} {version('tokenizers')}".encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"\n{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def _convert(files: list[Path], directory: Path) -> None:
    """In a process of its own: `transformers` takes seconds to import, and memory for as long as its process lives."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as work:
        # Links to the files that count, and no others: nothing else can change the outcome.
        source, made = Path(work, "source"), Path(work, "made")
        source.mkdir()
        made.mkdir()
        for file in files:
            (source / file.name).symlink_to(file.resolve())
        command = [sys.executable, "-m", "inference_service.convert_tokenizer", str(source / files[0].name), str(made)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise TokenizerError(f"{files[0]}: cannot be converted: {reason}")
        try:
            made.rename(directory)
        except OSError:
            # Another process was faster: what it has made serves as well.
            if not directory.is_dir():
                raise
