"""The prefill tokens of a step beside decodes: the rule, and what is timed for it."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from inference_service.config import Batch, load_config
from inference_service.engine.chunk_budget import DECODES, LEAST_CHUNK, RUSH, choose_chunk, measure_chunks
from inference_service.engine.echo import EchoExecutor, EchoTicket
from inference_service.engine.process import find_chunk
from inference_service.engine.step import StepPlan
from inference_service.execution.batch import check_rows


@pytest.mark.parametrize(
    ("milliseconds", "chosen"),
    [
        # A GPU that is full from 2,048 tokens on; one where larger steps go on to pay; one whose host is the bottleneck up to 2,048.
        ({256: 13, 512: 15, 1024: 25, 2048: 39, 4096: 77, 8184: 154}, 2048),
        ({256: 13, 512: 15, 1024: 20, 2048: 30, 4096: 45, 8184: 80}, 8184),
        ({512: 50, 1024: 51, 2048: 52, 4096: 103, 8184: 206}, 2048),
        # A processor, where a token takes what it takes.
        ({64: 101, 128: 200, 256: 399, 504: 800}, 64),
        # One bad measurement among the small does not matter.
        ({256: 12, 512: 98, 1024: 24, 2048: 39, 4096: 77}, 2048),
        ({7: 3}, 7),
    ],
)
def test_the_least_chunk_at_nearly_the_best_rate(milliseconds: dict[int, int], chosen: int) -> None:
    assert choose_chunk({tokens: taken / 1e3 for tokens, taken in milliseconds.items()}) == chosen


class TimedEcho(EchoExecutor):
    """Steps of 2 ms, and 0.1 ms more for each token; notes their plans."""

    plans: list[StepPlan]

    def launch(self, plan: StepPlan) -> EchoTicket:
        check_rows(plan.rows, 16)
        self.plans.append(plan)
        time.sleep(2e-3 + 1e-4 * plan.tokens)
        return super().launch(plan)


def make(batch: Batch, pages: int, max_context: int) -> TimedEcho:
    config = load_config(None, [f"batch.max_requests={batch.max_requests}", f"cache.pages={pages}"])
    executor = TimedEcho(config, 300, max_context)
    executor.plans = []
    return executor


@pytest.mark.parametrize("milliseconds", [{1024: 29, 2048: 39.7, 4096: 71.5, 8184: 153}, {1024: 23.5, 2048: 35.2, 4096: 69.0, 8184: 151}])
def test_the_chunk_of_a_rush_is_at_the_best_rate(milliseconds: dict[int, float]) -> None:
    """Also where the next smaller is 2 % below it."""
    seconds = {tokens: taken / 1e3 for tokens, taken in milliseconds.items()}
    assert choose_chunk(seconds) == 2048 and choose_chunk(seconds, RUSH) == 4096


@pytest.mark.parametrize(
    ("requests", "tokens", "pages", "context"), [(32, 512, 2048, 2048), (2, 300, 40, 90), (1, 8, 1, 16), (16, 8, 5, 33)]
)
def test_what_is_timed_fits_the_engine(requests: int, tokens: int, pages: int, context: int) -> None:
    batch = Batch(max_requests=requests, max_step_tokens=tokens)
    executor = make(batch, pages, context)
    seconds = measure_chunks(executor, batch, 16)
    chunks = list(seconds)
    assert chunks == sorted(set(chunks)) and all(later <= 2 * chunk for chunk, later in pairwise(chunks))
    assert chunks[0] <= LEAST_CHUNK and chunks[-1] <= batch.step_tokens
    for plan in executor.plans:
        assert plan.tokens <= batch.step_tokens and len(plan.rows) <= requests
        assert all(row.position <= context and max(row.pages) < pages for row in plan.rows)
        held = [page for row in plan.rows for page in row.pages]
        assert len(held) == len(set(held))
    if requests > DECODES:
        assert all(sum(row.is_decode for row in plan.rows) in (DECODES, pages - 1) for plan in executor.plans)


def test_slow_steps_are_not_timed_for_long() -> None:
    batch = Batch()
    executor = make(batch, 2048, 2048)
    assert measure_chunks(executor, batch, 16, limit_s=0.0) == {} and len(executor.plans) <= 1


def test_what_is_set_is_not_measured() -> None:
    said: list[str] = []
    config = load_config(None, ["batch.max_prefill_tokens=77"])
    executor = make(config.batch, 2048, 2048)
    assert find_chunk(config, executor, said.append) == (config.batch, 77) and not executor.plans and not said
    config = load_config(None, [])
    batch, rush = find_chunk(config, executor, said.append)
    assert f"at most {batch.max_prefill_tokens} prefill tokens beside decodes, {rush} while twice as many wait" in said[0]
    assert executor.plans
    assert 0 < batch.max_prefill_tokens <= rush <= batch.step_tokens
