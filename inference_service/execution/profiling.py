"""A profile of the engine's process while it goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig


def start_profile(path: Path, seconds: float) -> None:
    """Record all threads, and the GPU where there is one, for so long; then `path` is there, a Chrome trace.

    Where that is impossible, a file of the same name and the suffix .error says why.
    """
    threading.Thread(target=_record, args=(path, seconds), name="profile", daemon=True).start()


def _record(path: Path, seconds: float) -> None:
    written = path.with_suffix(".part.json")
    try:
        profiler = torch.profiler.profile(experimental_config=_ExperimentalConfig(profile_all_threads=True))
        with profiler:
            time.sleep(seconds)
        profiler.export_chrome_trace(str(written))
        written.rename(path)
    except Exception as error:  # whatever it is, steps go on
        path.with_suffix(".error").write_text(f"{type(error).__name__}: {error}")
