"""SmolLM2 in float32 through scheduler and executor: greedy text is that of `transformers`, whatever the engine does on the way.

Each case also asserts that what it is about has happened: batches, chunks, cache hits, copies, preemptions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from inference_service.config import Batch, Cache, Config, Model
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import StepPlan, Ticket
from inference_service.execution.executor import build_executor
from inference_service.fetch import resolve_model
from inference_service.messages import Sampling, Submit
from inference_service.rpc.forks import fork
from inference_service.text.tokenizer import Tokenizer

NEW_TOKENS = 64
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Who wrote Romeo and Juliet?",
    "How do I boil an egg?",
    "Translate 'good morning' to Spanish.",
    "What is 17 plus 25?",
    "Name the planets of the solar system in order from the sun, and say one thing about each of them.",
    "Tell me a story about a dog called Rex who finds a map in an old house, and end it happily.",
]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(model_dir)
    return [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]


@dataclass
class Run:
    """What an engine did with a list of requests."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    plans: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each step: decode rows, prefill rows, rows that are chunks of a longer prefill."""
    prefill_tokens: int = 0
    copies: int = 0
    preemptions: int = 0


class Engine:
    """The engine's loop in this process, with its steps overlapped."""

    def __init__(self, model_dir: Path, batch: Batch | None = None, cache: Cache | None = None) -> None:
        self.batch, self.cache = batch or Batch(), cache or Cache(memory_gib=0.25)
        config = Config(model=Model(dtype="float32", max_context=2048), batch=self.batch, cache=self.cache)
        self.executor = build_executor(config, model_dir, lambda what: None)
        self.scheduler = Scheduler(self.batch, KvPages(self.executor.info.pages, self.cache.page_size, prefix=self.cache.prefix))

    def run(self, submits: list[Submit]) -> Run:
        run, before = Run(), self.scheduler.preemptions
        for submit in submits:
            run.answers[submit.key] = []
            self.scheduler.submit(submit)
        in_flight: tuple[Scheduled, Ticket] | None = None
        while len(self.scheduler) or in_flight:
            step = self.scheduler.schedule(1)
            launched = (step, self.executor.launch(step.plan)) if step else None
            if step:
                run.plans.append(shape(step.plan))
                run.prefill_tokens += sum(len(row.token_ids) for row in step.plan.rows)
                run.copies += len(step.plan.copies)
            if in_flight:
                for _, output in self.scheduler.update(in_flight[0], in_flight[1].wait()):
                    run.answers[output.key] += output.token_ids
                    if output.scheduled_ns:
                        run.cached[output.key] = output.cached_tokens
            in_flight = launched
            self.scheduler.check_invariants()
        run.preemptions = self.scheduler.preemptions - before
        return run

    def close(self) -> None:
        self.executor.close()


MakeEngine = Callable[..., Engine]


def shape(plan: StepPlan) -> tuple[int, int, int]:
    decodes = sum(row.is_decode for row in plan.rows)
    return decodes, len(plan.rows) - decodes, sum(not row.samples or bool(row.start and row.token_ids) for row in plan.rows)


def greedy(prompts: list[list[int]], tokens: int = NEW_TOKENS) -> list[Submit]:
    return [Submit(key, prompt, Sampling(0.0, 0, 1.0, 0.0, 0), tokens, 0, [], -1, 1, 0) for key, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(model_dir: Path, prompts: list[list[int]]) -> Run:
    """Every prompt by itself."""
    engine = Engine(model_dir, Batch(max_requests=1), Cache(memory_gib=0.25, prefix=False))
    run = engine.run(greedy(prompts))
    engine.close()
    return run


@pytest.fixture(scope="module")
def expected(alone: Run) -> list[list[int]]:
    """What every other way must give too: test_one_at_a_time shows that it is the text of `transformers`."""
    return list(alone.answers.values())


@pytest.fixture
def engine(model_dir: Path) -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(batch: Batch | None = None, cache: Cache | None = None) -> Engine:
        made.append(Engine(model_dir, batch, cache))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_at_a_time(model_dir: Path, alone: Run, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Each token is the best one of `transformers` after the tokens before it: by induction, greedy decoding there gives the same."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, answer in zip(prompts, expected, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
        assert len(answer) == NEW_TOKENS
    assert max(decodes + prefills for decodes, prefills, _ in alone.plans) == 1


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_batched(engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]], page_size: int) -> None:
    run = engine(cache=Cache(memory_gib=0.25, page_size=page_size)).run(greedy(prompts))
    assert list(run.answers.values()) == expected
    assert max(decodes for decodes, _, _ in run.plans) == len(prompts)


def test_chunked_prefill_mixed_with_decodes(engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    batch = Batch(max_requests=4, max_step_tokens=16, max_prefill_tokens=7)
    run = engine(batch=batch, cache=Cache(memory_gib=0.25, prefix=False)).run(greedy(prompts))
    assert list(run.answers.values()) == expected
    assert sum(chunks for _, _, chunks in run.plans) > len(prompts)
    assert any(decodes and prefills for decodes, prefills, _ in run.plans)


def test_prefix_cache_hits(engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    warm = engine(cache=Cache(memory_gib=0.25, page_size=8))
    warm.run(greedy(prompts, tokens=1))
    run = warm.run(greedy(prompts))
    assert list(run.answers.values()) == expected
    assert all(run.cached[key] == (len(prompt) - 1) // 8 * 8 > 0 for key, prompt in enumerate(prompts))


def test_preemption_and_recompute(engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    needed = max(-(-(len(prompt) + NEW_TOKENS) // 4) for prompt in prompts)
    run = engine(cache=Cache(pages=needed * 3, page_size=4)).run(greedy(prompts))
    assert list(run.answers.values()) == expected
    assert run.preemptions > 0


def test_a_seed_gives_the_same_text_alone_and_in_any_batch(engine: MakeEngine, prompts: list[list[int]]) -> None:
    def drawn(seed: int, prompt: list[int], key: int) -> Submit:
        return Submit(key, prompt, Sampling(0.9, 40, 0.95, 0.02, seed), 32, 0, [], -1, 1, 0)

    one = engine(batch=Batch(max_requests=1), cache=Cache(memory_gib=0.25, prefix=False))
    seeds = [7, 7, 2**64 - 1, 123456789]
    submits = [drawn(seed, prompts[1], key) for key, seed in enumerate(seeds)]
    single = [one.run([submit]).answers[submit.key] for submit in submits]
    assert single[0] == single[1] != single[2] != single[3]
    batched = engine(batch=Batch(max_step_tokens=32, max_prefill_tokens=5))
    others = [drawn(99 + key, prompt, 100 + key) for key, prompt in enumerate(prompts)]
    run = batched.run([*others[:5], *submits, *others[5:]])
    assert [run.answers[key] for key in range(len(seeds))] == single
    assert max(decodes for decodes, _, _ in run.plans) > 5


CHOICES, CHOICE_TOKENS = 3, 12


@pytest.fixture(scope="module")
def choices(prompts: list[list[int]]) -> list[Submit]:
    """Two requests of several choices each; the prompts end within a page, and at the end of one."""
    submits = []
    for place, prompt in enumerate((prompts[0][:37], prompts[9][:48])):
        first = Submit(place * CHOICES, prompt, Sampling(1.0, 0, 0.95, 0.0, seed=9), CHOICE_TOKENS, 0, [], -1, 1, 0)
        submits += [first, *fork(first, range(first.key + 1, first.key + CHOICES))]
    return submits


@pytest.fixture(scope="module")
def chosen(model_dir: Path, choices: list[Submit]) -> dict[int, list[int]]:
    """What each choice answers as a request of its own, alone."""
    engine = Engine(model_dir, Batch(max_requests=1), Cache(memory_gib=0.25, prefix=False))
    answers = engine.run([replace(submit, fork_of=-1) for submit in choices]).answers
    engine.close()
    assert len(set(map(tuple, answers.values()))) == len(answers), "choices that are drawn differ"
    return answers


@pytest.mark.parametrize(("page_size", "prefix"), [(1, True), (16, False), (16, True), (100, False)])
def test_choices(engine: MakeEngine, choices: list[Submit], chosen: dict[int, list[int]], page_size: int, prefix: bool) -> None:
    run = engine(Batch(max_step_tokens=32), Cache(memory_gib=0.25, page_size=page_size, prefix=prefix)).run(choices)
    assert run.answers == chosen
    assert run.prefill_tokens == sum(len(first.token_ids) + CHOICES - 1 for first in choices[::CHOICES])
    assert run.copies == (0 if page_size == 1 else 2 * (CHOICES - 1)) and run.preemptions == 0


def test_choices_under_preemption(engine: MakeEngine, choices: list[Submit], chosen: dict[int, list[int]]) -> None:
    pages = -(-max(len(submit.token_ids) + CHOICE_TOKENS for submit in choices) // 4)
    run = engine(cache=Cache(pages=2 * pages, page_size=4, prefix=False)).run(choices)
    assert run.answers == chosen and run.preemptions > 0


def test_greedy_choices_are_equal(engine: MakeEngine, prompts: list[list[int]], expected: list[list[int]]) -> None:
    first = greedy(prompts[:1], tokens=16)[0]
    run = engine(cache=Cache(memory_gib=0.25, prefix=False)).run([first, *fork(first, [1, 2])])
    assert list(run.answers.values()) == [expected[0][:16]] * 3
