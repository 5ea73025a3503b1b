"""The sampling surface through scheduler and executor on a tiny checkpoint: answers are those of `transformers`, or of the definition,
whatever the engine does on the way.

Each case also asserts that what it is about has happened: batches, chunks, cache hits, preemptions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_service.config import Batch, Cache, Config, Model
from inference_service.engine.kv_pages import KvPages
from inference_service.engine.scheduler import Scheduled, Scheduler
from inference_service.engine.step import Executor, Ticket
from inference_service.execution.executor import build_executor
from inference_service.fetch import resolve_model
from inference_service.messages import Sampling, Submit, TokenLogprobs
from inference_service.text.tokenizer import Tokenizer
from tests.unit.edits_reference import banned_next, edited
from tests.unit.tiny_llama import save_tiny_llama

VOCAB, PAGE_SIZE, PAGES, SLOTS = 120, 4, 400, 6
PROMPTS = [[7, 3, 50, 99, 12, 5], [1], [44, 45, 46, 47, 48, 49, 50, 51, 52, 44, 45], [100, 20], [7, 3, 50, 99, 12, 5, 8, 8, 8, 8]]
ROOMY = Batch(max_requests=SLOTS)
CHUNKED = Batch(max_requests=SLOTS, max_step_tokens=7, max_prefill_tokens=3)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        std=0.3,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    models: Any = transformers.AutoModelForCausalLM
    return models.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> Iterator[Executor]:
    config = Config(model=Model(dtype="float32"), batch=ROOMY, cache=Cache(pages=PAGES, page_size=PAGE_SIZE))
    made = build_executor(config, model_dir, lambda what: None)
    yield made
    made.close()


@dataclass
class Run:
    """What an engine did with a list of requests."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    chunks: int = 0
    """Prefill rows that do not end a prompt."""
    most_rows: int = 0


def run(executor: Executor, submits: list[Submit], batch: Batch = ROOMY, pages: int = PAGES, scheduler: Scheduler | None = None) -> Run:
    """The engine's loop in this process, with its steps overlapped."""
    if scheduler is None:
        scheduler = Scheduler(batch, KvPages(pages, PAGE_SIZE))
    done = Run({submit.key: [] for submit in submits}, {submit.key: [] for submit in submits})
    for submit in submits:
        scheduler.submit(submit)
    in_flight: tuple[Scheduled, Ticket] | None = None
    while len(scheduler) or in_flight:
        step = scheduler.schedule(1)
        launched = (step, executor.launch(step.plan)) if step else None
        if step:
            done.chunks += sum(not row.samples for row in step.plan.rows)
            done.most_rows = max(done.most_rows, len(step.plan.rows))
        if in_flight:
            for _, output in scheduler.update(in_flight[0], in_flight[1].wait()):
                told = done.prompt_logprobs[output.key]
                told += output.prompt_logprobs or []
                if output.token_ids and not done.answers[output.key]:
                    prompt = next(submit for submit in submits if submit.key == output.key)
                    assert len(told) in (0, len(prompt.token_ids) - 1), "the answer begins once the prompt is told"
                done.answers[output.key] += output.token_ids
                if output.scheduled_ns:
                    done.cached[output.key] = output.cached_tokens
        in_flight = launched
        scheduler.check_invariants()
    done.preemptions = scheduler.preemptions
    return done


def greedy(**fields: Any) -> Sampling:
    return Sampling(0.0, 0, 1.0, 0.0, 0, **fields)


def submits(how: list[Sampling], tokens: int, prompt_logprobs: int = -1) -> list[Submit]:
    return [
        Submit(key, PROMPTS[key % len(PROMPTS)], each, tokens, 0, [], -1, 1, 0, prompt_logprobs=prompt_logprobs)
        for key, each in enumerate(how)
    ]


def generated(reference: Any, prompt: list[int], tokens: int = 24, **generation: Any) -> list[int]:
    """What `transformers` answers."""
    plain = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answer: list[int] = reference.generate(torch.tensor([prompt]), **plain, **generation)[0, len(prompt) :].tolist()
    return answer


def by_definition(reference: Any, submit: Submit) -> list[int]:
    """The answer, each token from the logits of the whole sequence."""
    prompt, output = submit.token_ids, list[int]()
    while len(output) < submit.max_tokens:
        with torch.inference_mode():
            logits: list[float] = reference(torch.tensor([prompt + output])).logits[0, -1].tolist()
        banned = banned_next(prompt + output, submit.sampling.bad_words)
        if len(output) < submit.min_tokens:
            banned |= set(submit.stop_token_ids)
        logits = edited(logits, submit.sampling, prompt, output, banned, set(range(VOCAB)))
        output.append(logits.index(max(logits)))
        if output[-1] in submit.stop_token_ids:
            return output[:-1]
    return output


@pytest.mark.parametrize(
    ("how", "generation"),
    [
        (greedy(repetition_penalty=1.3), {"repetition_penalty": 1.3}),
        (greedy(repetition_penalty=0.7), {"repetition_penalty": 0.7}),
        (greedy(logit_bias=[(3, 2.0), (7, -5.0), (50, 1.5)]), {"sequence_bias": {(3,): 2.0, (7,): -5.0, (50,): 1.5}}),
    ],
)
def test_answers_are_those_of_transformers(executor: Executor, reference: Any, how: Sampling, generation: dict[str, Any]) -> None:
    """By its own `generate`, whose words and penalties are of the whole sequence, as ours are."""
    expected = [generated(reference, prompt, **generation) for prompt in PROMPTS]
    answered = run(executor, submits([how] * len(PROMPTS), 24))
    assert list(answered.answers.values()) == expected
    assert expected != list(run(executor, submits([greedy()] * len(PROMPTS), 24)).answers.values())
    assert answered.most_rows == len(PROMPTS)


def test_bad_words_are_those_of_transformers(executor: Executor, reference: Any) -> None:
    """Words that the model would say, of one to four tokens; one begins with the prompt's end."""
    plain = run(executor, submits([greedy()] * len(PROMPTS), 24)).answers
    for key, prompt in enumerate(PROMPTS[:3]):
        said = prompt + plain[key]
        end = len(prompt)
        words = [said[end + 9 : end + 10], said[end - 1 : end + 1], said[end + 2 : end + 5], said[end + 4 : end + 8]]
        expected = generated(reference, prompt, bad_words_ids=words)
        submit = Submit(key, prompt, greedy(bad_words=words), 24, 0, [], -1, 1, 0)
        for batch in (ROOMY, CHUNKED):
            assert run(executor, [submit], batch).answers[key] == expected != plain[key]


def test_smollm2_avoids_words_and_repetition_as_transformers_does() -> None:
    """Words that it says where it may, given as text."""
    path = resolve_model("smollm2-135m-instruct")
    tokenizer = Tokenizer.load(path)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_pretrained(path, dtype=torch.float32).eval()
    config = Config(model=Model(dtype="float32", max_context=512), batch=ROOMY, cache=Cache(pages=PAGES, page_size=PAGE_SIZE))
    executor = build_executor(config, path, lambda what: None)
    questions = [("What is the capital of France?", ["Paris"]), ("Name some colours.", ["Red", "Light Blue", "color"])]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question, _ in questions]
    words = [[ids for word in each for ids in tokenizer.encode_word(word)] for _, each in questions]
    hows = [greedy(repetition_penalty=1.15, bad_words=each) for each in words]
    done = run(executor, [Submit(key, prompts[key], how, 16, 0, [], -1, 1, 0) for key, how in enumerate(hows)])
    executor.close()
    for key, (_, each) in enumerate(questions):
        assert done.answers[key] == generated(model, prompts[key], 16, repetition_penalty=1.15, bad_words_ids=words[key])
        text = tokenizer.decode(done.answers[key])
        assert not any(word in text for word in each), text


EVERY = [
    greedy(frequency_penalty=0.8),
    greedy(presence_penalty=1.5),
    greedy(frequency_penalty=-0.5, presence_penalty=0.3),
    greedy(),
    greedy(repetition_penalty=1.2, frequency_penalty=0.2, logit_bias=[(8, 1.0)], bad_words=[[8, 8], [44]]),
    greedy(repetition_penalty=1.1),
    greedy(presence_penalty=-1.0, bad_words=[[5], [12, 5, 8]]),
    greedy(logit_bias=[(8, 4.0)], frequency_penalty=2.0),
]


@pytest.fixture(scope="module")
def expected(reference: Any) -> list[list[int]]:
    return [by_definition(reference, submit) for submit in submits(EVERY, 20)]


def test_batched(executor: Executor, expected: list[list[int]]) -> None:
    done = run(executor, submits(EVERY, 20))
    assert list(done.answers.values()) == expected
    assert done.most_rows == SLOTS, "slots pass from one request to the next"


def test_chunked_prefill(executor: Executor, expected: list[list[int]]) -> None:
    done = run(executor, submits(EVERY, 20), CHUNKED)
    assert list(done.answers.values()) == expected and done.chunks > 3


def test_after_preemption(executor: Executor, expected: list[list[int]]) -> None:
    """What was output before counts as output when its tokens are computed again, in another slot."""
    done = run(executor, submits(EVERY, 20), pages=20)
    assert list(done.answers.values()) == expected and done.preemptions > 2


def test_from_the_prefix_cache(executor: Executor, expected: list[list[int]]) -> None:
    """Tokens that are not computed count as the others do."""
    scheduler = Scheduler(ROOMY, KvPages(PAGES, PAGE_SIZE))
    run(executor, submits(EVERY, 1), scheduler=scheduler)
    done = run(executor, submits(EVERY, 20), scheduler=scheduler)
    assert list(done.answers.values()) == expected
    assert all((done.cached[submit.key] > 0) == (len(submit.token_ids) > PAGE_SIZE) for submit in submits(EVERY, 20))


def test_forks_count_from_their_own_beginning(executor: Executor, reference: Any) -> None:
    """They compute the prompt's last token alone, whose step tells the whole of it."""
    hows = [EVERY[4], EVERY[5], EVERY[0], EVERY[6]]
    asked = [Submit(key, PROMPTS[2], how, 12, 0, [], -1, 1, 0, fork_of=0 if key else -1) for key, how in enumerate(hows)]
    for batch in (ROOMY, CHUNKED):
        assert list(run(executor, asked, batch).answers.values()) == [by_definition(reference, submit) for submit in asked]


tokens = st.integers(0, VOCAB - 1)
anything = st.builds(
    greedy,
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, 2.0]), max_size=3).map(lambda bias: sorted(bias.items())),
    bad_words=st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=6),
)


@given(
    hows=st.lists(anything, min_size=1, max_size=6),
    stops=st.lists(tokens, max_size=20, unique=True),
    min_tokens=st.integers(0, 5),
    extra_pages=st.integers(0, 40),
    chunked=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_any_combination(
    executor: Executor, reference: Any, hows: list[Sampling], stops: list[int], min_tokens: int, extra_pages: int, chunked: bool
) -> None:
    asked = [
        Submit(key, PROMPTS[key % len(PROMPTS)], how, 8, min_tokens, stops, -1, 1, 0, prompt_logprobs=key % 3 - 1)
        for key, how in enumerate(hows)
    ]
    done = run(executor, asked, CHUNKED if chunked else ROOMY, pages=6 + extra_pages)
    assert list(done.answers.values()) == [by_definition(reference, submit) for submit in asked]
    assert [len(scores) for scores in done.prompt_logprobs.values()] == [
        len(submit.token_ids) - 1 if submit.prompt_logprobs >= 0 else 0 for submit in asked
    ]


@pytest.mark.parametrize(("batch", "pages"), [(ROOMY, PAGES), (CHUNKED, PAGES), (CHUNKED, 11)])
def test_prompt_logprobs_are_exact(executor: Executor, reference: Any, batch: Batch, pages: int) -> None:
    """Each is told once and in order, cut into chunks or computed again, and from a warm prefix cache that must not be used."""
    scheduler = Scheduler(batch, KvPages(pages, PAGE_SIZE))
    run(executor, submits([greedy()] * len(PROMPTS), 1), scheduler=scheduler)
    done = run(executor, submits([greedy(repetition_penalty=1.5)] * len(PROMPTS), 16, prompt_logprobs=3), scheduler=scheduler)
    for key, prompt in enumerate(PROMPTS):
        with torch.inference_mode():
            scores = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)[:-1]
        told = done.prompt_logprobs[key]
        chosen = scores.gather(1, torch.tensor(prompt)[1:, None]).flatten().tolist()
        assert [entry.chosen for entry in told] == pytest.approx(chosen, abs=1e-4)
        assert [entry.top_ids for entry in told] == scores.topk(3).indices.tolist()
        for entry, best in zip(told, scores.topk(3).values.tolist(), strict=True):
            assert entry.top == pytest.approx(best, abs=1e-4)
        assert done.cached[key] == 0
    assert (done.preemptions > 0) == (pages < PAGES) and (done.chunks > 0) == (batch is CHUNKED)


def test_what_was_computed_for_prompt_logprobs_is_cached_for_others(executor: Executor) -> None:
    scheduler = Scheduler(ROOMY, KvPages(PAGES, PAGE_SIZE))
    run(executor, submits([greedy()] * 3, 2, prompt_logprobs=0), scheduler=scheduler)
    assert run(executor, submits([greedy()] * 3, 2), scheduler=scheduler).cached == {0: 4, 1: 0, 2: 8}


def test_the_prompt_of_one_token_has_nothing_to_tell(executor: Executor) -> None:
    done = run(executor, [Submit(0, [5], greedy(), 2, 0, [], -1, 1, 0, prompt_logprobs=2)])
    assert done.prompt_logprobs == {0: []} and len(done.answers[0]) == 2
