"""The load generator's prompts: exact lengths, the same in every run, different from one another."""

from __future__ import annotations

import pytest

from inference_service.config import Loadtest, Workload
from loadgen._target import Model, TargetError
from loadgen._workload import SyntheticWorkload

MODEL = Model(name="tiny", vocab_size=50, max_context=64, eos_token_ids=frozenset({3, 49}))


def workload(seed: int = 0, process: int = 0, input_tokens: int = 40, output_tokens: int = 24) -> SyntheticWorkload:
    lengths = Workload(input_tokens=input_tokens, output_tokens=output_tokens, temperature=0.5)
    return SyntheticWorkload(Loadtest(seed=seed, workload=lengths), MODEL, process)


def test_lengths_and_sampling_are_those_of_the_configuration() -> None:
    for number in range(20):
        request = workload().request(number)
        assert (len(request.token_ids), request.output_tokens, request.temperature) == (40, 24, 0.5)


def test_ids_are_of_the_vocabulary_and_never_end_a_sequence() -> None:
    ids = {token_id for number in range(200) for token_id in workload().request(number).token_ids}
    assert ids == set(range(50)) - {3, 49}


def test_a_prompt_depends_on_seed_process_and_number_alone() -> None:
    one, other = workload(), workload()
    other.request(99)
    assert [one.next() for _ in range(5)] == [other.next() for _ in range(5)] == [workload().request(number) for number in range(5)]


def test_prompts_differ_between_numbers_processes_and_seeds() -> None:
    requests = [workload(seed, process).request(number) for seed in range(3) for process in range(3) for number in range(3)]
    assert len({tuple(request.token_ids) for request in requests}) == 27
    assert len({request.seed for request in requests}) == 27


def test_the_first_prompt_stays_the_same_over_versions() -> None:
    assert workload(input_tokens=8).request(0).token_ids == [25, 15, 14, 32, 44, 11, 38, 14]


def test_lengths_beyond_the_context_are_refused_by_name() -> None:
    workload(input_tokens=40, output_tokens=24)
    with pytest.raises(TargetError, match=r"loadtest\.workload: input_tokens \+ output_tokens is 65, but tiny has a context of 64"):
        workload(input_tokens=41)


def test_a_vocabulary_of_the_settings_makes_the_same_prompts_for_targets_that_know_theirs_and_those_that_do_not() -> None:
    loadtest = Loadtest(workload=Workload(input_tokens=40, output_tokens=24, vocab_size=45))
    silent = Model(name="silent", vocab_size=0, max_context=0, eos_token_ids=frozenset())
    prompts = [SyntheticWorkload(loadtest, model).request(3).token_ids for model in (MODEL, silent)]
    assert prompts[0] == prompts[1]
    assert max(prompts[0]) < 45


@pytest.mark.parametrize(("vocab_size", "known"), [(0, 0), (51, 50)])
def test_a_vocabulary_that_is_unknown_or_too_large_is_refused(vocab_size: int, known: int) -> None:
    loadtest = Loadtest(workload=Workload(vocab_size=vocab_size))
    with pytest.raises(TargetError, match=r"^loadtest\.workload\.vocab_size: "):
        SyntheticWorkload(loadtest, Model(name="m", vocab_size=known, max_context=0, eos_token_ids=frozenset()))


def test_without_seeds_the_server_draws() -> None:
    assert SyntheticWorkload(Loadtest(workload=Workload(seeded=False)), Model("m", 50, 0, frozenset())).request(0).seed is None
