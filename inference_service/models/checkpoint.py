"""Loads safetensors into a model's own memory, tensor by tensor: no second copy of the model exists at any time."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from inference_service.kernels.fp8 import E4M3, BlockFp8, blocks, quantize
from inference_service.models.config_json import ModelError
from inference_service.models.fp8 import SCALES as FP8_SCALES
from inference_service.models.fp8 import in_fp8
from inference_service.models.mxfp4 import dequantize_into, plain_shape

INDEX = "model.safetensors.index.json"
IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""Endings of tensors that old checkpoints hold and that are computed."""

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The dtypes whose values are weights as they stand, and their bytes."""

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors that stand for one in MXFP4."""
PACKED = {"U8": 1}
"""Their dtype, and its bytes."""
FP8 = {"F8_E4M3": 1}
"""The dtype of values that have scales in blocks, and its bytes."""


@dataclass(frozen=True)
class Entry:
    """A tensor as its file's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    end: int
    """Of its bytes, counted from the header's end."""
    scales: Path | None = None
    """The file of its scales, if it is in MXFP4 or FP8."""


def load_checkpoint(
    model_dir: Path,
    weights: dict[str, Tensor],
    tied_embeddings: bool = False,
    unused: tuple[str, ...] = (),
    to_fp8: bool = False,
) -> None:
    """Copy every tensor of the checkpoint into its place in `weights`, converting the dtype. `unused`: beginnings of the names of those
    that are passed over. `to_fp8`: matrices of layers are rounded to FP8 on the way, even where their place is for plain ones.

    Raises ModelError, which names file and tensor, for a missing, unexpected, misshapen or cut-off tensor and for one that is not of
    floating-point numbers, before anything is copied.
    """
    entries = _join_fp8(_join_mxfp4(_read_entries(model_dir)))
    unwanted = {name for name in entries if name.endswith(IGNORED) or name.startswith(unused)}
    unwanted |= {"lm_head.weight"} if tied_embeddings else set()
    entries = {name: entry for name, entry in entries.items() if name not in unwanted}
    _check(entries, weights, model_dir)
    if not to_fp8:
        _check_kept(entries, weights)
    for file in sorted({entry.file for entry in entries.values()}):
        with ExitStack() as stack:
            _copy({name: entry for name, entry in entries.items() if entry.file == file}, _Files(stack), weights, to_fp8)


def _join_mxfp4(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Each pair of blocks and scales as the one tensor that it stands for."""
    joined = dict(entries)
    for name in [name for name in entries if name.endswith(BLOCKS)]:
        plain = name.removesuffix(BLOCKS)
        if plain + SCALES not in entries:
            raise ModelError(f"{entries[name].file}: holds {name}, but no file holds {plain + SCALES}")
        blocks, scales = joined.pop(name), joined.pop(plain + SCALES)
        if len(blocks.shape) != 4 or scales.shape != blocks.shape[:-1]:
            raise ModelError(f"{scales.file}: {plain + SCALES} has shape {scales.shape}, which does not fit {name}'s {blocks.shape}")
        for entry, part in ((blocks, name), (scales, plain + SCALES)):
            _check_dtype(entry, part, PACKED)
        joined[plain] = replace(blocks, shape=plain_shape(blocks.shape), scales=scales.file)
    return joined


def _join_fp8(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Each matrix in FP8 with the file of its scales."""
    joined = dict(entries)
    for name in [name for name, entry in entries.items() if entry.dtype in FP8 and name + FP8_SCALES in entries]:
        scales = joined.pop(name + FP8_SCALES)
        _check_dtype(scales, name + FP8_SCALES, FLOATS)
        if scales.shape != (fitting := tuple(map(blocks, entries[name].shape))):
            raise ModelError(f"{scales.file}: {name + FP8_SCALES} has shape {scales.shape}, but {name} has {fitting} blocks of 128 x 128")
        joined[name] = replace(entries[name], scales=scales.file)
    return joined


def _check_kept(entries: dict[str, Entry], weights: dict[str, Tensor]) -> None:
    for name, entry in entries.items():
        if weights[name].dtype == E4M3 and entry.dtype not in FP8:
            wanted = "with kernels.gemm_fp8 and kernels.moe_fp8 dequantized it can be loaded"
            raise ModelError(f"{entry.file}: {name} has dtype {entry.dtype}, though config.json's quantization_config is fp8: {wanted}")


class _Files(dict[Path, Any]):
    """Each file of tensors, opened at its first use: to open one is to read a header that may list thousands. What was read of a file
    counts as memory of the process until it is closed."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, file: Path) -> Any:
        self[file] = opened = self._stack.enter_context(safe_open(file, framework="pt"))
        return opened

    def tensor(self, file: Path, name: str) -> Tensor:
        """Raises ModelError, which names both."""
        try:
            tensor: Tensor = self[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: {name}: {error}") from None
        return tensor


def _copy(entries: dict[str, Entry], files: _Files, weights: dict[str, Tensor], to_fp8: bool) -> None:
    for name, entry in entries.items():
        if entry.scales is None:
            tensor = files.tensor(entry.file, name)
            if to_fp8 and in_fp8(name):
                _place_fp8(name, quantize(tensor.to(weights[name].device)), weights)
            else:
                weights[name].copy_(tensor)
        elif entry.dtype in FP8:
            scales = files.tensor(entry.scales, name + FP8_SCALES)
            _place_fp8(name, BlockFp8(files.tensor(entry.file, name), scales.float()), weights)
        else:
            scales = files.tensor(entry.scales, name + SCALES)
            dequantize_into(weights[name], files.tensor(entry.file, name + BLOCKS), scales)


def _place_fp8(name: str, matrix: BlockFp8, weights: dict[str, Tensor]) -> None:
    """As it is, or made plain where its place is for that."""
    place = weights[name]
    if place.dtype == E4M3:
        place.copy_(matrix.values)
        weights[name + FP8_SCALES].copy_(matrix.scales)
    else:
        place.copy_(BlockFp8(matrix.values.to(place.device), matrix.scales.to(place.device)).dequantize(place.dtype))


def _check(entries: dict[str, Entry], weights: dict[str, Tensor], model_dir: Path) -> None:
    if missing := sorted(name for name in weights.keys() - entries.keys() if not name.endswith(FP8_SCALES)):
        raise ModelError(f"{model_dir}: no file holds {_listed(missing)}")
    if unexpected := sorted(entries.keys() - weights.keys()):
        raise ModelError(f"{entries[unexpected[0]].file}: holds {_listed(unexpected)}, which config.json's architecture does not have")
    for name, entry in entries.items():
        if entry.shape != tuple(weights[name].shape):
            raise ModelError(f"{entry.file}: {name} has shape {entry.shape}, but config.json says {tuple(weights[name].shape)}")
        if entry.scales is None:
            _check_dtype(entry, name, FLOATS)


def _check_dtype(entry: Entry, name: str, supported: dict[str, int]) -> None:
    if entry.dtype not in supported:
        raise ModelError(f"{entry.file}: {name} has dtype {entry.dtype}, which is not supported; supported are {', '.join(supported)}")


def _read_entries(model_dir: Path) -> dict[str, Entry]:
    index = model_dir / INDEX
    if not index.exists():
        files = sorted(model_dir.glob("*.safetensors"))
        if not files:
            pickled = sorted(file.name for file in model_dir.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".pkl"))
            why = f"; {', '.join(pickled[:3])} may run code when read, and is refused" if pickled else ""
            raise ModelError(f"{model_dir}: holds no .safetensors file{why}")
        return {name: entry for file in files for name, entry in _read_header(file).items()}
    placed = _read_index(index)
    headers = {file: _read_header(model_dir / file) for file in sorted(set(placed.values()))}
    for name, file in placed.items():
        if name not in headers[file]:
            raise ModelError(f"{model_dir / file}: lacks {name}, which {INDEX} says it holds")
    return {name: entry for header in headers.values() for name, entry in header.items()}


def _read_index(index: Path) -> dict[str, str]:
    """The file that holds each tensor."""
    try:
        return {name: str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files: {error}") from None


def _read_header(file: Path) -> dict[str, Entry]:
    """A safetensors file begins with its header's length (8 bytes, little-endian) and the header, JSON; offsets count from its end."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ModelError(f"{file}: is cut off within its header")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ModelError(f"{file}: is not a safetensors file")
    entries = {name: _read_entry(file, name, tensor) for name, tensor in header.items() if name != "__metadata__"}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].end):
        if (end := 8 + length + entry.end) > size:
            raise ModelError(f"{file}: is cut off within {name}: it has {size} bytes and needs {end} or more")
    return entries


def _read_entry(file: Path, name: str, tensor: Any) -> Entry:
    try:
        begin, end = map(int, tensor["data_offsets"])
        entry = Entry(file, str(tensor["dtype"]), tuple(map(int, tensor["shape"])), end)
    except (LookupError, TypeError, ValueError):
        raise ModelError(f"{file}: {name}: its dtype, shape and data_offsets cannot be read") from None
    size = (FLOATS | PACKED | FP8).get(entry.dtype)
    if size and math.prod(entry.shape) * size != end - begin:
        raise ModelError(f"{file}: {name} has {end - begin} bytes, which are not {entry.shape} in {entry.dtype}")
    return entry


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
