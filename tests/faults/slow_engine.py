"""The engine's process with a start that takes a while, as that of a large model does."""

from __future__ import annotations

import time
from collections.abc import Callable

from inference_service.engine import process
from inference_service.engine.step import Executor
from inference_service.messages import EngineStart

START_S = 3.0


def load_executor(start: EngineStart, progress: Callable[[str], None]) -> Executor:
    progress("loading slowly")
    time.sleep(START_S)
    return load(start, progress)


if __name__ == "__main__":
    load, process.load_executor = process.load_executor, load_executor
    process.main()
