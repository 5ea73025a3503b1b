"""A tiny Llama checkpoint with random weights, for tests of what is around the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers


def save_tiny_llama(model_dir: Path, std: float, **sizes: Any) -> Path:
    """Write it in float32, with weights of `std` and norms near 1; `sizes` are LlamaConfig's."""
    torch.manual_seed(0)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(transformers.LlamaConfig(num_hidden_layers=2, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(1.0, 0.1) if name.endswith("norm.weight") else weight.normal_(0.0, std)
    model.save_pretrained(model_dir)
    return model_dir
