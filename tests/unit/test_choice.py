"""What a choice tells of its outputs must not depend on how many of them it is handed at once."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from inference.v1 import generate_pb2 as pb
from inference_service.messages import Finish, Output, Sampling, Submit
from inference_service.models.synthetic_tokenizer import write_tokenizer
from inference_service.rpc.choice import Choice
from inference_service.telemetry.clock import to_unix_ns
from inference_service.text.assembler import Assembler
from inference_service.text.tokenizer import Tokenizer

END = 299


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model_dir = tmp_path_factory.mktemp("model")
    (model_dir / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": END}))
    write_tokenizer(model_dir)
    return Tokenizer.load(model_dir)


def outputs(tokenizer: Tokenizer, text: str, finish: Finish, preemptions: int = 0) -> list[tuple[int, Output]]:
    """A step a token at 10, 20, ..., and the end in the step after them."""
    steps = [(10 * step, Output(1, [token_id])) for step, token_id in enumerate(tokenizer.encode(text), 1)]
    time_ns, first = steps[0]
    steps[0] = time_ns, Output(1, first.token_ids, scheduled_ns=5, preemptions=preemptions)
    return [*steps, (10 * len(steps) + 10, Output(1, [], finish=finish))]


def make(tokenizer: Tokenizer, stop: list[str]) -> Choice:
    submit = Submit(1, [1, 2], Sampling(0.0, 0, 1.0, 0.0, 0), 100, 0, [END], -1, 1, 0)
    return Choice(0, submit, Assembler(tokenizer.detokenizer(skip_special_tokens=True), stop), tokenizer)


def run(tokenizer: Tokenizer, steps: list[tuple[int, Output]], cuts: list[int], stop: list[str]) -> tuple[str, pb.Finished]:
    """The text and the last message, of outputs that are handed over in pieces."""
    choice = make(tokenizer, stop)
    responses: list[pb.GenerateResponse] = []
    for begin, end in pairwise([0, *cuts, len(steps)]):
        if choice.finish is None:
            responses += choice.deltas(steps[begin:end])
    text = "".join(response.delta.text for response in responses)
    return text, choice.finished(0)[0].finished


@pytest.mark.parametrize("cuts", [[], [1], [3], [4], [1, 2, 3, 4]])
def test_a_stop_token_counts_however_it_arrives(tokenizer: Tokenizer, cuts: list[int]) -> None:
    text, finished = run(tokenizer, outputs(tokenizer, "abcd", Finish("stop", END)), cuts, [])
    assert (text, finished.usage.completion_tokens, finished.stop_token_id) == ("abcd", 5, END)
    assert (finished.timings.first_token_unix_ns, finished.timings.last_token_unix_ns) == (to_unix_ns(10), to_unix_ns(50))


@pytest.mark.parametrize("cuts", [[], [1], [3], [4], [1, 2, 3, 4]])
def test_what_comes_after_a_stop_string_does_not_count_however_it_arrives(tokenizer: Tokenizer, cuts: list[int]) -> None:
    text, finished = run(tokenizer, outputs(tokenizer, "abcd", Finish("stop", END)), cuts, ["bc"])
    assert (text, finished.usage.completion_tokens, finished.stop_string) == ("a", 3, "bc")
    assert (finished.timings.first_token_unix_ns, finished.timings.last_token_unix_ns) == (to_unix_ns(10), to_unix_ns(30))


@pytest.mark.parametrize(("finish", "stop"), [(Finish("abort"), []), (Finish("length"), []), (Finish("length"), ["bc"])])
def test_preemptions_are_told_however_the_answer_ends(tokenizer: Tokenizer, finish: Finish, stop: list[str]) -> None:
    _, finished = run(tokenizer, outputs(tokenizer, "abcd", finish, preemptions=2), [], stop)
    assert finished.timings.preemptions == 2


@pytest.mark.parametrize(("reason", "accepted"), [("stop", True), ("abort", True), ("deadline", False), ("invalid", False)])
def test_an_answer_that_ends_before_its_first_step_is_accepted_first(tokenizer: Tokenizer, reason: str, accepted: bool) -> None:
    choice = make(tokenizer, [])
    assert not choice.is_acceptable
    assert choice.deltas([(10, Output(1, [], finish=Finish(reason)))]) == []
    assert choice.is_acceptable is accepted and bool(choice.finished(0)) is accepted
