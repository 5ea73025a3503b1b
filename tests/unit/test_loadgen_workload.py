"""The load generator's prompts: exact lengths, the same in every run and for every target, different from one another."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference_service.config import Config, ConfigError, load_config
from inference_service.config import Model as ModelConfig
from inference_service.loadtest import Lengths, Loadtest, Part
from inference_service.loadtest import Workload as WorkloadConfig
from loadgen._target import ErrorClass, Failure, Message, Model, Observation, Takes, TargetError
from loadgen._workload import ANY, Workload

MODEL = Model(name="tiny", vocab_size=50, max_context=64, eos_token_ids=frozenset({3, 49}))
SILENT = Model(name="silent", vocab_size=0, max_context=0, eos_token_ids=frozenset())
CHAT = Takes(token_ids=False, text=False, messages=True)
WORDS = ["sun", "moon", "tree", "river", "stone"]


def workload(
    seed: int = 0,
    process: int = 0,
    processes: int = 1,
    model: Model = MODEL,
    takes: Takes = ANY,
    mixture: tuple[Part, ...] = (),
    **settings: Any,
) -> Workload:
    settings = {"input_tokens": 40, "output_tokens": 24, "temperature": 0.5, **settings}
    loadtest = Loadtest(seed=seed, workload=WorkloadConfig(**settings), mixture=mixture)
    return Workload(Config(loadtest=loadtest), model, takes, process, processes)


def answered(token_ids: list[int] | None = None, text: str = "") -> Observation:
    return Observation(answer_ids=token_ids or [], answer_text=[text], cut_off=False)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A directory with a tokenizer for which each of WORDS is one token, alone and after a space, and nothing else is a word."""
    pieces = [*WORDS, *(f"Ġ{word}" for word in WORDS)]
    characters = sorted({character for piece in pieces for character in piece} | {"2"})
    made = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate([*characters, *pieces])}, unk_token="2"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_lengths_and_sampling_are_those_of_the_configuration() -> None:
    for number in range(20):
        request = workload(top_k=7, exact_output=False).request(number)
        assert (len(request.token_ids), request.output_tokens, request.temperature, request.top_k) == (40, 24, 0.5, 7)
        assert not request.exact
        assert request.seed is not None and 0 <= request.seed < 2**31


def test_ids_are_of_the_vocabulary_and_never_end_a_sequence() -> None:
    ids = {token_id for number in range(200) for token_id in workload().request(number).token_ids}
    assert ids == set(range(50)) - {3, 49}


def test_a_prompt_depends_on_seed_and_number_alone() -> None:
    one, other = workload(), workload()
    other.request(99)
    assert [one.next() for _ in range(5)] == [other.next() for _ in range(5)] == [workload().request(number) for number in range(5)]


@pytest.mark.parametrize("settings", [{}, {"input_tokens": Lengths(min=3, max=40), "prefix_share": 0.5, "prefix_groups": 3}])
def test_processes_send_together_what_one_sends_alone(settings: dict[str, Any]) -> None:
    alone = [workload(**settings).request(number) for number in range(12)]
    shared = [w.next() for process in range(3) for w in [workload(process=process, processes=3, **settings)] for _ in range(4)]
    pooled = [
        request
        for w in [workload(process=process, processes=3, **settings) for process in range(3)]
        for request in [w.next() for _ in range(4)]
    ]
    assert sorted(shared, key=lambda request: request.index) == sorted(pooled, key=lambda request: request.index) == alone


def test_prompts_differ_between_numbers_and_seeds() -> None:
    requests = [workload(seed).request(number) for seed in range(4) for number in range(6)]
    assert len({tuple(request.token_ids) for request in requests}) == 24
    assert len({request.seed for request in requests}) == 24


def test_the_first_prompt_stays_the_same_over_versions() -> None:
    assert workload(input_tokens=8).request(0).token_ids == [34, 40, 20, 28, 39, 45, 23, 0]


def test_lengths_beyond_the_context_are_refused_by_name() -> None:
    workload(input_tokens=40, output_tokens=24)
    with pytest.raises(TargetError, match=r"loadtest\.workload: input_tokens \+ output_tokens is 65, but tiny has a context of 64"):
        workload(input_tokens=Lengths(min=1, max=41))
    with pytest.raises(TargetError, match=r"turns \* \(input_tokens \+ output_tokens\) is 80"):
        workload(input_tokens=10, output_tokens=10, turns=Lengths(min=1, max=4))


def test_a_vocabulary_of_the_settings_makes_the_same_prompts_for_targets_that_know_theirs_and_those_that_do_not() -> None:
    prompts = [workload(model=model, vocab_size=45).request(3).token_ids for model in (MODEL, SILENT)]
    assert prompts[0] == prompts[1]
    assert max(prompts[0]) < 45


@pytest.mark.parametrize(("vocab_size", "known"), [(0, 0), (51, 50)])
def test_a_vocabulary_that_is_unknown_or_too_large_is_refused(vocab_size: int, known: int) -> None:
    with pytest.raises(TargetError, match=r"^loadtest\.workload\.vocab_size: "):
        workload(model=Model("m", known, 0, frozenset()), vocab_size=vocab_size)


def test_without_seeds_the_server_draws_and_the_prompt_is_the_same() -> None:
    assert workload(seeded=False).request(0).seed is None
    assert workload(seeded=False).request(0).token_ids == workload().request(0).token_ids


@pytest.mark.parametrize(
    ("lengths", "mean", "std"),
    [
        (Lengths(min=10, max=30), 20, 20 / math.sqrt(12)),
        (Lengths(min=1, max=10**6, distribution="normal", mean=200, std=20), 200, 20),
        (Lengths(min=1, max=10**6, distribution="lognormal", mean=300, std=150), 300, 150),
    ],
)
def test_lengths_have_the_distribution_asked_for(lengths: Lengths, mean: float, std: float) -> None:
    made = workload(model=SILENT, vocab_size=9, input_tokens=lengths, output_tokens=lengths)
    requests = [made.request(number) for number in range(4000)]
    for drawn in ([len(request.token_ids) for request in requests], [request.output_tokens for request in requests]):
        assert statistics.fmean(drawn) == pytest.approx(mean, rel=0.05)
        assert statistics.pstdev(drawn) == pytest.approx(std, rel=0.1)
    assert [len(request.token_ids) for request in requests] != [request.output_tokens for request in requests]


def test_lengths_keep_their_bounds() -> None:
    made = workload(input_tokens=Lengths(min=5, max=9, distribution="normal", mean=7, std=50))
    assert {len(made.request(number).token_ids) for number in range(200)} == {5, 6, 7, 8, 9}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{min: 5, max: 4}", "loadtest.workload.input_tokens: min is 5, but max is 4"),
        ("{min: 1, max: 4, distribution: normal}", "loadtest.workload.input_tokens: distribution normal needs a mean"),
        ("{min: 1, max: 4, mean: 2}", "loadtest.workload.input_tokens: distribution uniform has no mean"),
        ("{min: 1, max: 4, median: 2}", "loadtest.workload.input_tokens: Object contains unknown field `median`"),
        ("{min: 1}", "loadtest.workload.input_tokens: Object missing required field `max`"),
    ],
)
def test_bad_lengths_are_refused_by_name(value: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(overrides=[f"loadtest.workload.input_tokens={value}"])
    assert message in str(error.value)


def test_the_prompts_of_a_group_have_their_beginning_in_common() -> None:
    made = workload(prefix_share=0.75, prefix_groups=2)
    prompts = [made.request(number).token_ids for number in range(40)]
    assert len({tuple(prompt[:30]) for prompt in prompts}) == 2
    assert len({tuple(prompt[30:]) for prompt in prompts}) == 40


def test_a_shorter_prompt_of_a_group_begins_as_a_longer_one_does() -> None:
    made = workload(input_tokens=Lengths(min=10, max=40), prefix_share=0.5)
    prompts = sorted((made.request(number).token_ids for number in range(20)), key=len)
    assert len(prompts[0]) < len(prompts[-1])
    for shorter, longer in pairwise(prompts):
        half = round(len(shorter) / 2)
        assert shorter[:half] == longer[:half]


def test_a_trace_sets_lengths_and_prefix_blocks() -> None:
    made = workload(model=SILENT, vocab_size=1000)
    one = made.request(0, input_tokens=1500, output_tokens=7, prefix_ids=[4, 5, 6])
    other = made.request(1, input_tokens=1100, output_tokens=8, prefix_ids=[4, 5, 9])
    assert (len(one.token_ids), one.output_tokens, len(other.token_ids), other.output_tokens) == (1500, 7, 1100, 8)
    assert one.token_ids[:1024] == other.token_ids[:1024]
    assert one.token_ids[1024:1100] != other.token_ids[1024:]
    assert len(made.request(2, input_tokens=600, prefix_ids=[4]).token_ids) == 600
    assert made.request(3).output_tokens == 24


def test_a_conversation_holds_the_answers_that_were_received() -> None:
    made = workload(input_tokens=5, output_tokens=4, turns=3)
    first = made.request(7)
    second = made.next_turn(first, answered([31, 32]))
    assert second is not None
    assert (second.index, second.turn, second.token_ids[:7]) == (7, 1, [*first.token_ids, 31, 32])
    assert len(second.token_ids) == 12
    third = made.next_turn(second, answered([33]))
    assert third is not None and third.token_ids[:13] == [*second.token_ids, 33]
    assert made.next_turn(third, answered([34])) is None
    assert made.next_turn(first, answered([35])) != second


def test_a_conversation_ends_with_a_failure_or_where_it_was_cut_off() -> None:
    made = workload(input_tokens=5, output_tokens=4, turns=3)
    failed = Observation(failure=Failure(ErrorClass.SERVER, "X", ""), cut_off=False)
    assert made.next_turn(made.request(0), failed) is None
    assert made.next_turn(made.request(0), Observation()) is None
    assert workload().next_turn(workload().request(0), answered([1])) is None


def test_conversations_have_the_number_of_turns_drawn_for_them() -> None:
    made = workload(input_tokens=2, output_tokens=2, turns=Lengths(min=1, max=4))

    def turns(index: int) -> int:
        request, count = made.request(index), 1
        while (following := made.next_turn(request, answered([1, 2]))) is not None:
            request, count = following, count + 1
        return count

    assert {turns(index) for index in range(40)} == {1, 2, 3, 4}


def test_texts_are_of_words_of_one_token_each(tokenizer: str) -> None:
    request = workload(prompt="text", tokenizer=tokenizer, model=SILENT).request(0)
    assert len(request.text.split(" ")) == 40
    assert set(request.text.split(" ")) == set(WORDS)
    assert len(Tokenizer.from_file(f"{tokenizer}/tokenizer.json").encode(request.text).ids) == 40
    assert request.token_ids == [] and request.messages == ()


def test_a_chat_has_the_same_text_as_a_completion_and_goes_on_with_the_answer(tokenizer: str) -> None:
    settings: dict[str, Any] = {"prompt": "text", "tokenizer": tokenizer, "input_tokens": 5, "output_tokens": 4, "turns": 2}
    chat, text = workload(takes=CHAT, **settings), workload(**settings)
    request, completion = chat.request(0), text.request(0)
    assert request.messages == (Message("user", completion.text),)
    following, continued = chat.next_turn(request, answered(text="Hi!")), text.next_turn(completion, answered(text="Hi!"))
    assert following is not None and continued is not None
    said = following.messages[2].content
    assert following.messages == (*request.messages, Message("assistant", "Hi!"), Message("user", said))
    assert len(said.split(" ")) == 5
    assert continued.text == f"{completion.text}Hi! {said}"


@pytest.mark.parametrize(
    ("takes", "settings", "key"),
    [
        (CHAT, {}, "prompt: the target takes no token ids"),
        (Takes(text=False), {"prompt": "text"}, "prompt: the target takes token ids alone"),
        (Takes(exact=False), {}, "exact_output: the target cannot"),
        (Takes(answer_ids=False), {"turns": 2, "input_tokens": 2, "output_tokens": 2}, "turns: the target does not tell"),
        (Takes(), {"prompt": "text", "tokenizer": "/nowhere"}, "tokenizer: there is no '/nowhere'"),
    ],
)
def test_what_the_target_cannot_do_is_refused_by_name(takes: Takes, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(TargetError) as error:
        workload(takes=takes, **settings)
    assert str(error.value).startswith(f"loadtest.workload.{key}")


def test_the_tokenizer_is_by_default_that_of_the_model() -> None:
    config = Config(model=ModelConfig(path="no-such-model"), loadtest=Loadtest(workload=WorkloadConfig(prompt="text")))
    with pytest.raises(TargetError, match=r"^model\.path: there is no 'no-such-model'"):
        Workload(config, SILENT)


def test_a_mixture_has_the_shares_asked_for_and_keeps_each_workload_whole() -> None:
    long = Part(share=0.25, workload=WorkloadConfig(input_tokens=50, output_tokens=2))
    made = workload(input_tokens=10, mixture=(long,))
    requests = [made.request(number) for number in range(1000)]
    lengths = [(len(request.token_ids), request.output_tokens) for request in requests]
    assert set(lengths) == {(10, 24), (50, 2)}
    assert lengths.count((50, 2)) / 1000 == pytest.approx(0.25, abs=0.05)
    assert [made.request(number) for number in range(1000)] == requests


def test_a_mixture_that_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(TargetError, match=r"^loadtest\.mixture: the shares"):
        workload(mixture=(Part(share=0.6, workload=WorkloadConfig(input_tokens=2, output_tokens=2)),) * 2)
    with pytest.raises(TargetError, match=r"^loadtest\.mixture\[0\]\.workload: input_tokens"):
        workload(mixture=(Part(share=0.5, workload=WorkloadConfig(input_tokens=100)),))


def test_settings_reach_other_processes_whole() -> None:
    config = load_config(overrides=["loadtest.workload.turns={min: 1, max: 3}", "loadtest.mixture=[{share: 0.5, workload: {top_k: 3}}]"])
    assert msgspec.convert(msgspec.to_builtins(config), Config) == config
