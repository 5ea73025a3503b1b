"""Prompts from files: each form, conversations, lengths, and errors that name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from inference_service.config import Config
from inference_service.loadtest import Loadtest
from inference_service.loadtest import Workload as WorkloadConfig
from loadgen._target import Message, Model, Observation, Request, Takes, TargetError
from loadgen._workload import ANY, Workload

MODEL = Model(name="tiny", vocab_size=0, max_context=0, eos_token_ids=frozenset())
CHAT = Takes(token_ids=False, text=False, messages=True)
VOCABULARY = ["?", "why", "is", "sky", "blue", "light", "scatters", "and", "red", "dusk"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A directory with a tokenizer for which each word is a token: its id is its place in VOCABULARY."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def write_lines(directory: str, *lines: Any) -> str:
    path = Path(directory) / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return str(path)


def write_sharegpt(directory: str, *conversations: list[tuple[str, str]]) -> str:
    path = Path(directory) / "sharegpt.json"
    entries = [{"id": "x", "conversations": [{"from": who, "value": what} for who, what in talk]} for talk in conversations]
    path.write_text(json.dumps(entries))
    return str(path)


def workload(file: str, takes: Takes = ANY, model: Model = MODEL, seed: int = 0, **settings: Any) -> Workload:
    settings = {"file": file, "tokenizer": str(Path(file).parent), **settings}
    return Workload(Config(loadtest=Loadtest(seed=seed, workload=WorkloadConfig(**settings))), model, takes)


def prompts(made: Workload, count: int) -> list[Request]:
    return [made.request(index) for index in range(count)]


def test_each_entry_comes_once_and_then_again_in_another_order(tokenizer: str) -> None:
    made = workload(write_lines(tokenizer, *({"token_ids": [number]} for number in range(20))))
    ids = [request.token_ids[0] for request in prompts(made, 40)]
    assert sorted(ids[:20]) == sorted(ids[20:]) == list(range(20))
    assert ids[:20] != ids[20:]
    assert [made.request(index).token_ids[0] for index in (30, 3, 39)] == [ids[30], ids[3], ids[39]]
    other = workload(write_lines(tokenizer, *({"token_ids": [number]} for number in range(20))), seed=1)
    assert [request.token_ids[0] for request in prompts(other, 20)] != ids[:20]


def test_a_line_sets_its_answers_length_and_the_settings_those_of_the_others(tokenizer: str) -> None:
    file = write_lines(tokenizer, {"token_ids": [1], "output_tokens": 9}, "", {"token_ids": [2]})
    lengths = {request.token_ids[0]: request.output_tokens for request in prompts(workload(file, output_tokens=4), 2)}
    assert lengths == {1: 9, 2: 4}


def test_prompts_are_turned_into_the_form_that_the_settings_say(tokenizer: str) -> None:
    file = write_lines(tokenizer, {"prompt": "why is sky"}, {"token_ids": [4, 8]})
    assert {tuple(request.token_ids) for request in prompts(workload(file), 2)} == {(1, 2, 3), (4, 8)}
    assert {request.text for request in prompts(workload(file, prompt="text"), 2)} == {"why is sky", "blue red"}
    chat = prompts(workload(file, CHAT, prompt="text"), 2)
    assert {request.messages for request in chat} == {(Message("user", "why is sky"),), (Message("user", "blue red"),)}


def test_messages_are_sent_as_they_are(tokenizer: str) -> None:
    said = [{"role": "system", "content": "light"}, {"role": "user", "content": "why"}]
    (request,) = prompts(workload(write_lines(tokenizer, {"messages": said}), CHAT, prompt="text"), 1)
    assert request.messages == (Message("system", "light"), Message("user", "why"))


TALK = [("human", "why is sky blue"), ("gpt", "light scatters"), ("human", "and red"), ("gpt", "dusk"), ("human", "why")]


def test_sharegpt_gives_the_first_question_and_its_answers_length(tokenizer: str) -> None:
    file = write_sharegpt(tokenizer, TALK, [("gpt", "light"), ("human", "why"), ("gpt", "dusk")], [("human", "and")], [])
    made = workload(file)
    assert {(tuple(request.token_ids), request.output_tokens) for request in prompts(made, 5)} == {((1, 2, 3, 4), 2)}
    assert made.next_turn(made.request(0), Observation(cut_off=False)) is None


def test_sharegpt_conversations_go_on_with_the_answers_that_were_received(tokenizer: str) -> None:
    file = write_sharegpt(tokenizer, TALK)
    made = workload(file, turns=5)
    second = made.next_turn(made.request(0), Observation(answer_ids=[9, 9], cut_off=False))
    assert second is not None
    assert (second.token_ids, second.output_tokens) == ([1, 2, 3, 4, 9, 9, 7, 8], 1)
    assert made.next_turn(second, Observation(answer_ids=[5], cut_off=False)) is None
    chat = workload(file, CHAT, turns=5, prompt="text")
    following = chat.next_turn(chat.request(0), Observation(answer_text=["dusk", " dusk"], cut_off=False))
    assert following is not None
    roles = [(message.role, message.content) for message in following.messages]
    assert roles == [("user", "why is sky blue"), ("assistant", "dusk dusk"), ("user", "and red")]


def test_what_is_too_long_is_left_out_or_refused(tokenizer: str) -> None:
    file = write_lines(tokenizer, {"token_ids": [1] * 3, "output_tokens": 3}, {"token_ids": [2] * 6, "output_tokens": 6})
    assert {len(request.token_ids) for request in prompts(workload(file, file_max_tokens=6), 4)} == {3}
    with pytest.raises(TargetError, match=r"prompts\.jsonl:2: 12 tokens .* context of 11; .*file_max_tokens"):
        workload(file, model=Model("tiny", 0, 11, frozenset()))
    with pytest.raises(TargetError, match=r"no entry that can be sent"):
        workload(file, file_max_tokens=5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:2: Input data was truncated"),
        (
            {"prompt": "why", "token_ids": [1]},
            "prompts.jsonl:2: one of prompt, token_ids and messages is needed, but there is prompt and",
        ),
        ({"output_tokens": 3}, "prompts.jsonl:2: one of prompt, token_ids and messages is needed, but there is none"),
        ({"prompt": "why", "output_tokens": 0}, "prompts.jsonl:2: Expected `int` >= 1 - at `$.output_tokens`"),
        ({"prompt": 3}, "prompts.jsonl:2: Expected `str`, got `int` - at `$.prompt`"),
        ({"text": "why"}, "prompts.jsonl:2: Object contains unknown field `text`"),
        ({"messages": [{"role": "user", "content": "why"}]}, "prompts.jsonl:2: messages are for a chat"),
    ],
)
def test_a_bad_line_is_named(tokenizer: str, line: Any, message: str) -> None:
    with pytest.raises(TargetError) as error:
        workload(write_lines(tokenizer, {"token_ids": [1]}, line))
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tokenizer: str) -> None:
    with pytest.raises(TargetError, match=r"^loadtest\.workload\.file: .*none\.jsonl: No such file"):
        workload(f"{tokenizer}/none.jsonl")
    Path(tokenizer, "wrong.json").write_text('[{"conversations": [{"from": "human"}]}]')
    with pytest.raises(TargetError, match=r"wrong\.json: not a file of ShareGPT's: .*`value`.*\[0\]\.conversations\[0\]"):
        workload(f"{tokenizer}/wrong.json")


def test_a_trace_has_lengths_of_its_own(tokenizer: str) -> None:
    loadtest = Loadtest(arrival="trace", workload=WorkloadConfig(file=write_lines(tokenizer, {"token_ids": [1]})))
    with pytest.raises(TargetError, match=r"^loadtest\.workload\.file: a trace"):
        Workload(Config(loadtest=loadtest), MODEL)
