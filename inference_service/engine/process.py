"""The engine's process: `python -m inference_service.engine.process`, started by an EngineHost with an EngineStart as JSON on its input."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from inference_service.config import Batch, Config
from inference_service.engine.chunk_budget import RUSH, choose_chunk, measure_chunks
from inference_service.engine.grammars import Grammars
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.link import FrontEnds
from inference_service.engine.loop import EngineLoop
from inference_service.engine.parent import end_with_parent
from inference_service.engine.scheduler import Scheduler
from inference_service.engine.step import Executor, Row, StepPlan
from inference_service.messages import EngineStart, Failed, Progress, Ready, Sampling
from inference_service.telemetry.logs import configure_logs

log = logging.getLogger(__name__)


def main() -> None:
    """Load, say Ready, then loop. Ends with status 1, having said Failed, when that is impossible."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineStart)
    configure_logs("engine", start.config.telemetry.log_format)
    log_flashinfer(start.config.telemetry.flashinfer_log_level)
    end_with_parent(start.parent_pid, Path(start.address.removeprefix("ipc://")))
    front_ends = FrontEnds(start.address)

    def progress(what: str) -> None:
        log.info("%s", what)
        front_ends.report(Progress(what))

    front_ends.await_watcher(timeout_s=10)
    try:
        executor = load_executor(start, progress)
        batch, rush_tokens = find_chunk(start.config, executor, progress)
        front_ends.ready(ready(start.config, executor, batch.prefill_tokens))
        pages = KvPages(executor.info.pages, start.config.cache.page_size, prefix=start.config.cache.prefix)
        grammars = Grammars(start.model_dir, executor.info.vocab_size)
        loop = EngineLoop(front_ends, Scheduler(batch, pages, grammars, rush_tokens), executor)
        # What is loaded stays; looking through it again would hold up steps for tens of milliseconds.
        gc.collect()
        gc.freeze()
        loop.run()
    except Exception as error:
        if not isinstance(error, ValueError):  # a wrong configuration or model says all in its message
            log.exception("the engine failed")
        front_ends.report(Failed(f"{type(error).__name__}: {error}"))
        front_ends.close()
        sys.exit(1)


def log_flashinfer(level: int) -> None:
    """Have FlashInfer log the calls of its API. It reads its settings when it is imported, and would by itself write to stdout."""
    if level:
        os.environ["FLASHINFER_LOGLEVEL"] = str(level)
    os.environ.setdefault("FLASHINFER_LOGDEST", "stderr")


def load_executor(start: EngineStart, progress: Callable[[str], None]) -> Executor:
    """The configured executor, after it has made a first token."""
    executor: Executor
    if start.config.model.load_format == "echo":
        from inference_service.engine.echo import EchoExecutor
        from inference_service.text.tokenizer import Tokenizer

        vocab_size = Tokenizer.load(Path(start.model_dir)).vocab_size
        executor = EchoExecutor(start.config, vocab_size, start.config.model.max_context or 2048)
    else:
        from inference_service.execution.executor import build_executor

        executor = build_executor(start.config, Path(start.model_dir), progress)
    progress("making a first token")
    first_token(executor)
    return executor


def first_token(executor: Executor) -> None:
    """Prefill one token and decode another: whatever is set up lazily is set up now, and what cannot run fails now."""
    greedy = Sampling(0.0, 0, 1.0, 0.0, 0)
    executor.launch(StepPlan([Row(0, 0, 1, [0], [0], True, greedy)])).wait()
    if executor.info.max_context > 1:
        executor.launch(StepPlan([Row(0, 1, 1, [], [0, executor.info.pages - 1], True, greedy)])).wait()


def find_chunk(config: Config, executor: Executor, progress: Callable[[str], None]) -> tuple[Batch, int]:
    """The batch's settings, with the prefill tokens beside decodes measured where they are not set; and those while many wait."""
    if config.batch.max_prefill_tokens or config.model.load_format == "echo":
        return config.batch, config.batch.prefill_tokens
    seconds = measure_chunks(executor, config.batch, config.cache.page_size)
    if not seconds:
        progress(f"at most {config.batch.prefill_tokens} prefill tokens beside decodes: steps are too slow here to be timed at start")
        return config.batch, config.batch.prefill_tokens
    chunk, rush = choose_chunk(seconds), choose_chunk(seconds, RUSH)
    timed = ", ".join(f"{tokens}: {1e3 * taken:.1f} ms" for tokens, taken in seconds.items())
    progress(f"at most {chunk} prefill tokens beside decodes, {rush} while twice as many wait, by the time of such steps ({timed})")
    return msgspec.structs.replace(config.batch, max_prefill_tokens=chunk), rush


def ready(config: Config, executor: Executor, prefill_tokens: int) -> Ready:
    """What the front end needs to know to validate requests and describe the server."""
    info = executor.info
    return Ready(
        architecture=info.architecture,
        dtype=info.dtype,
        parameters=info.parameters,
        vocab_size=info.vocab_size,
        max_context=info.max_context,
        device=info.device,
        device_arch=info.device_arch,
        page_size=config.cache.page_size,
        pages=info.pages,
        kernels=info.kernels,
        prefill_tokens=prefill_tokens,
        pid=os.getpid(),
    )


if __name__ == "__main__":
    main()
