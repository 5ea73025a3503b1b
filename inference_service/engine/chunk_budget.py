"""How many prefill tokens a step may have beside decodes: measured at start, since it depends on model, device and host.

A step of few tokens wastes its fixed part (reading all weights, launching); one of many makes the decodes beside it wait. So the least
chunk is taken that still prefills at nearly the best rate: beyond it, decodes would wait for little. While many prompt tokens wait, that
little counts, since decodes are waiting to begin: then it is the least chunk at the best rate.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from inference_service.config import Batch
from inference_service.engine.step import Executor, Row, StepPlan
from inference_service.messages import Sampling

NEARLY = 0.9
RUSH = 0.99
"""Of the best rate; the difference to 1 is what measurements vary."""
DECODES = 8
"""Beside each chunk that is timed."""
LEAST_CHUNK = 64
LIMIT_S = 2.0
"""A start is not held up for longer, but for the step that runs then."""
GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


def choose_chunk(seconds: Mapping[int, float], share: float = NEARLY) -> int:
    """The smallest chunk that computes at least `share` of the best's tokens a second, from the time that a step with each takes."""
    best = max(tokens / taken for tokens, taken in seconds.items())
    return min(tokens for tokens, taken in seconds.items() if tokens / taken >= share * best)


def measure_chunks(executor: Executor, batch: Batch, page_size: int, limit_s: float = LIMIT_S) -> dict[int, float]:
    """Seconds of a step with each chunk, doubled from LEAST_CHUNK up to what a step holds, beside some decodes. Empty where that takes
    longer than `limit_s`. Nobody may use the KV pages yet."""
    decodes = min(DECODES, batch.max_requests - 1, executor.info.pages - 1)
    room = min((batch.max_requests - decodes) * executor.info.max_context, (executor.info.pages - decodes) * page_size)
    largest = min(batch.step_tokens - decodes, room)
    chunks = [LEAST_CHUNK << doublings for doublings in range(32) if LEAST_CHUNK << doublings < largest] + [largest]
    begin, seconds = time.perf_counter(), dict.fromkeys(chunks, float("inf"))
    for again in (False, True):  # the first run may set something up
        for chunk in chunks:
            if time.perf_counter() - begin > limit_s:
                return seconds if again else {}
            seconds[chunk] = min(seconds[chunk], _seconds(executor, chunk, decodes, page_size))
    return seconds


def _seconds(executor: Executor, tokens: int, decodes: int, page_size: int) -> float:
    info = executor.info
    rows = [Row(slot, page_size - 1, 1, [], [slot], True, GREEDY) for slot in range(decodes)]
    first_page = decodes
    while tokens and first_page < info.pages:
        length = min(tokens, info.max_context, (info.pages - first_page) * page_size)
        pages = list(range(first_page, first_page - (-length // page_size)))
        ids = [position % info.vocab_size for position in range(length)]
        rows.append(Row(len(rows), 0, length, ids, pages, True, GREEDY))
        tokens, first_page = tokens - length, first_page + len(pages)
    begin = time.perf_counter()
    executor.launch(StepPlan(rows)).wait()
    return time.perf_counter() - begin
