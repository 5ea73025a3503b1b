"""Loading checkpoints: every tensor in its place, no second copy, and errors that name file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from inference_service.models.checkpoint import load_checkpoint
from inference_service.models.config_json import ModelError

SHAPES = {"a.weight": (6, 4), "b.weight": (3,), "c.weight": (2, 2)}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def places() -> dict[str, Tensor]:
    return {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}


def save_sharded(model_dir: Path) -> None:
    whole = tensors()
    save_file({"a.weight": whole["a.weight"]}, model_dir / "model-1.safetensors")
    save_file({"b.weight": whole["b.weight"], "c.weight": whole["c.weight"]}, model_dir / "model-2.safetensors")
    placed = {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors", "c.weight": "model-2.safetensors"}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_is_copied_into_its_place(tmp_path: Path, sharded: bool, dtype: torch.dtype) -> None:
    save_sharded(tmp_path) if sharded else save_file(tensors(), tmp_path / "model.safetensors")
    # A fused matrix: a and c are views into memory that others share.
    memory = torch.full((40,), float("nan"), dtype=dtype)
    weights = {"a.weight": memory[:24].view(6, 4), "b.weight": memory[24:27], "c.weight": memory[30:34].view(2, 2)}
    load_checkpoint(tmp_path, weights)
    for name, tensor in tensors().items():
        assert torch.equal(weights[name], tensor.to(dtype))
    assert memory.isnan().sum() == 9


def test_no_second_copy_is_made(tmp_path: Path) -> None:
    """Peak memory while loading stays well under twice the model (pages of the mapped file apart)."""
    count, size = 24, 1 << 20
    save_file({f"{index}.weight": torch.full((size,), float(index)) for index in range(count)}, tmp_path / "model.safetensors")
    weights = {f"{index}.weight": torch.zeros(size).fill_(-1) for index in range(count)}
    before = anonymous_bytes()
    peaks = []

    class Watching(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            peaks.append(anonymous_bytes())
            return super().__getitem__(name)

    load_checkpoint(tmp_path, Watching(weights))
    peaks.append(anonymous_bytes())
    assert all(weights[f"{index}.weight"][-1] == index for index in range(count))
    assert max(peaks) - before < 4 * size * count // 4


def test_one_file_at_a_time_is_mapped(tmp_path: Path) -> None:
    """What was read of a mapped file counts as the process's memory."""
    save_sharded(tmp_path)
    mapped = []

    class Watching(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            maps = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else ""
            mapped.append(len({line.split()[-1] for line in maps.splitlines() if str(tmp_path) in line}))
            return super().__getitem__(name)

    load_checkpoint(tmp_path, Watching(places()))
    assert max(mapped) <= 1


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    pytest.skip("needs /proc")


def rewrite(model_dir: Path, change: Callable[[dict[str, Tensor]], None], file: str = "model-2.safetensors") -> None:
    content = dict(load_file(model_dir / file))
    change(content)
    save_file(content, model_dir / file)


def truncate(model_dir: Path) -> None:
    path = model_dir / "model-2.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def truncate_header(model_dir: Path) -> None:
    (model_dir / "model-2.safetensors").write_bytes(b"\xff\0\0\0\0\0\0\0{")


def rewrite_header(model_dir: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = model_dir / "model-2.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(change(json.loads(content[8:end]))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


def add_to_index(model_dir: Path) -> None:
    index = model_dir / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": placed | {"d.weight": "model-1.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: rewrite(d, lambda c: c.__delitem__("b.weight")), ["model-2.safetensors", "b.weight"]),
        (lambda d: rewrite(d, lambda c: c.update(e=torch.zeros(1))), ["model-2.safetensors", "holds e"]),
        (lambda d: rewrite(d, lambda c: c.update({"b.weight": torch.zeros(5)})), ["model-2.safetensors", "b.weight", "(5,)", "(3,)"]),
        (
            lambda d: rewrite(d, lambda c: c.update({"b.weight": torch.zeros(3, dtype=torch.int32)})),
            ["model-2.safetensors", "b.weight", "I32"],
        ),
        (
            lambda d: rewrite(d, lambda c: c.update({"b.weight": torch.zeros(3, dtype=torch.float8_e4m3fn)})),
            ["model-2.safetensors", "b.weight", "F8_E4M3"],
        ),
        (
            lambda d: rewrite(d, lambda c: c.update({"b.weight": torch.zeros(3, dtype=torch.uint8)})),
            ["model-2.safetensors", "b.weight", "U8"],
        ),
        (lambda d: rewrite_header(d, lambda h: []), ["model-2.safetensors", "not a safetensors file"]),
        (lambda d: rewrite_header(d, lambda h: h | {"b.weight": 7}), ["model-2.safetensors", "b.weight", "cannot be read"]),
        (lambda d: rewrite_header(d, lambda h: h | {"b.weight": {"dtype": "F32"}}), ["model-2.safetensors", "b.weight", "cannot be read"]),
        (
            lambda d: rewrite_header(d, lambda h: h | {"b.weight": h["b.weight"] | {"data_offsets": [0, 8]}}),
            ["model-2.safetensors", "b.weight has 8 bytes", "(3,) in F32"],
        ),
        (truncate, ["model-2.safetensors", "cut off within", ".weight"]),
        (truncate_header, ["model-2.safetensors", "header"]),
        (lambda d: (d / "model-2.safetensors").write_bytes(b""), ["model-2.safetensors", "header"]),
        # What a repository has in a file's place until large files are pulled.
        (
            lambda d: (d / "model-2.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            ["model-2.safetensors", "header"],
        ),
        (add_to_index, ["model-1.safetensors", "d.weight", "index.json"]),
        (lambda d: (d / "model-1.safetensors").unlink(), ["model-1.safetensors", "No such file"]),
        (lambda d: (d / "model.safetensors.index.json").write_text("[]"), ["model.safetensors.index.json"]),
    ],
)
def test_damage_is_reported_with_file_and_tensor(tmp_path: Path, damage: Callable[[Path], None], words: list[str]) -> None:
    save_sharded(tmp_path)
    damage(tmp_path)
    weights = places()
    with pytest.raises(ModelError) as refusal:
        load_checkpoint(tmp_path, weights)
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert all(weight.isnan().all() for weight in weights.values()), "nothing may be copied before all is checked"


def test_a_tensor_in_no_file_is_named(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(6, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no file holds b\.weight, c\.weight"):
        load_checkpoint(tmp_path, places())


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    torch.save(tensors(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no \.safetensors file; pytorch_model\.bin may run code"):
        load_checkpoint(tmp_path, places())


def test_computed_and_tied_tensors_are_left_out(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2), "lm_head.weight": torch.zeros(3)}
    save_file(tensors() | extra, tmp_path / "model.safetensors")
    weights = places()
    load_checkpoint(tmp_path, weights, tied_embeddings=True)
    assert not weights["c.weight"].isnan().any()
    with pytest.raises(ModelError, match="lm_head"):
        load_checkpoint(tmp_path, places())
