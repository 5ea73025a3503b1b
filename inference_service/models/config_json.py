"""Reads config.json of a model directory. Imports no torch, so that the front end can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """The model cannot be served; the message names the file and the field."""


def read_json(model_dir: Path) -> dict[str, Any]:
    """config.json as it stands. Raises ModelError."""
    path = model_dir / "config.json"
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path}: must hold an object")
    return raw
