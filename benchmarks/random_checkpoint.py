"""Write a random checkpoint of a published shape, which any server can load.

    python -m benchmarks.random_checkpoint MODEL DIRECTORY [--fp8]

Routers spread tokens over experts as those of a trained model do: their logits have a standard deviation of `--router`, tokens differ by
their embeddings, and what layers add to the residual stream is scaled by 1 / sqrt(2 layers), so that it does not hide them. Correction
biases are 0. The same seed gives the same weights on one kind of device, in FP8 rounded.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from inference_service.config import Kernels
from inference_service.fetch import resolve_model
from inference_service.kernels.fp8 import quantize
from inference_service.kernels.selection import make_operators, select
from inference_service.kernels.support import Setting
from inference_service.models.build import Build
from inference_service.models.checkpoint import INDEX
from inference_service.models.config import ModelConfig
from inference_service.models.families import make_model, read_config
from inference_service.models.fp8 import SCALES, in_fp8

STD = 0.02
ROUTERS = (".gate.weight", ".router.weight", ".shared_expert_gate.weight")
RESIDUAL = ("o_proj.weight", "down_proj.weight", ".w2.weight")
"""Endings of what is added to the residual stream."""
METHOD = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def standard_deviation(name: str, config: ModelConfig, router: float) -> float:
    """Of a tensor's values."""
    if name.endswith("embed_tokens.weight"):
        return 1.0
    if name.endswith(ROUTERS):
        return float(router / config.hidden_size**0.5)
    return STD / (2 * config.layers) ** 0.5 if name.endswith(RESIDUAL) else STD


def make(name: str, like: Tensor, config: ModelConfig, router: float, generator: torch.Generator) -> Tensor:
    """A tensor on the generator's device, in the checkpoint's dtype."""
    device = generator.device
    if name.endswith("norm.weight"):
        return torch.ones(like.shape, dtype=config.dtype, device=device)
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(like.shape, dtype=torch.float32, device=device)
    tensor = torch.empty(like.shape, dtype=config.dtype, device=device)
    return tensor.normal_(0.0, standard_deviation(name, config, router), generator=generator)


class Shards:
    """Writes tensors into files of a size, and the index in the end."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory, self._most_bytes = directory, most_bytes
        self._tensors: dict[str, Tensor] = {}
        self._placed: dict[str, str] = {}
        self._bytes = self._files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._tensors[name] = tensor.cpu()
        self._bytes += tensor.nbytes
        if self._bytes >= self._most_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._tensors:
            return
        self._files += 1
        file = f"model-{self._files:05}.safetensors"
        save_file(self._tensors, self._directory / file, {"format": "pt"})
        self._placed |= dict.fromkeys(self._tensors, file)
        self._tensors, self._bytes = {}, 0
        (self._directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self._placed}))


def write(model: str, directory: Path, fp8: bool, router: float = 1.0, seed: int = 0, shard_gib: float = 4.0) -> None:
    """Write it; what lies beside the model's config.json is copied."""
    source = resolve_model(model)
    config = read_config(source)
    setting = Setting("x86_64", torch.float32, config.head_dim, config.heads // config.kv_heads, 16)
    places = make_model(Build(make_operators(select(Kernels(), setting)), config.dtype, torch.device("meta")), config).weights()
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith((".safetensors", INDEX)):
            shutil.copy(file, directory)
    generator = torch.Generator("cuda" if torch.cuda.is_available() else "cpu").manual_seed(seed)
    shards = Shards(directory, int(shard_gib * 2**30))
    for name, like in places.items():
        tensor = make(name, like, config, router, generator)
        if fp8 and (in_fp8(name) or name.endswith("kv_b_proj.weight")):
            matrix = quantize(tensor)
            shards.add(name, matrix.values)
            shards.add(name + SCALES, matrix.scales)
        else:
            shards.add(name, tensor)
    shards.flush()
    if fp8:
        plain = ["lm_head", *(name.removesuffix(".weight") for name in places if name.endswith(ROUTERS))]
        path = directory / "config.json"
        raw = json.loads(path.read_text()) | {"quantization_config": METHOD | {"modules_to_not_convert": plain}}
        path.write_text(json.dumps(raw, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a directory of configs/models, or any other that the service finds")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--fp8", action="store_true", help="matrices of layers in FP8, in blocks of 128 x 128")
    parser.add_argument("--router", type=float, default=1.0, help="the standard deviation of routers' logits")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.model, arguments.directory, arguments.fp8, arguments.router, arguments.seed)


if __name__ == "__main__":
    main()
