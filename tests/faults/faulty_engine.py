"""The engine's process with an executor that fails where a prompt has a certain token, each in its own way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from inference_service.engine import process
from inference_service.engine.step import Executor, StepPlan, Ticket
from inference_service.messages import EngineStart

RAISES, EXHAUSTS, DIES, HANGS = 49001, 49002, 49003, 49004


def fail_on_the_device() -> NoReturn:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def run_out_of_memory() -> NoReturn:
    raise MemoryError("out of memory")


def be_killed() -> None:
    """As the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(3600)


FAULTS: dict[int, Callable[[], None]] = {RAISES: fail_on_the_device, EXHAUSTS: run_out_of_memory, DIES: be_killed, HANGS: hang}


class FaultyExecutor:
    """Another executor, until it meets one of those tokens."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.info = executor.info
        self.compiles = 0

    @property
    def fused_steps(self) -> int:
        return self._executor.fused_steps

    def launch(self, plan: StepPlan) -> Ticket:
        for row in plan.rows:
            for token_id in FAULTS.keys() & set(row.token_ids):
                FAULTS[token_id]()
        return self._executor.launch(plan)

    def close(self) -> None:
        self._executor.close()


def load_executor(start: EngineStart, progress: Callable[[str], None]) -> Executor:
    return FaultyExecutor(load(start, progress))


if __name__ == "__main__":
    load, process.load_executor = process.load_executor, load_executor
    process.main()
