"""Seeds of choices."""

from __future__ import annotations

from inference_service.messages import Sampling, Submit
from inference_service.rpc.forks import choice_seed, fork


def test_seeds_are_those_of_splitmix64() -> None:
    # The published test vector of SplitMix64, started at 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [choice_seed(1234567, choice) for choice in range(1, 6)] == expected
    assert choice_seed(1234567, 0) == 1234567


def test_seeds_of_near_requests_never_meet() -> None:
    near = [*range(500), *range(2**63 - 250, 2**63 + 250), *range(2**64 - 500, 2**64)]
    seeds = [choice_seed(seed, choice) for seed in near for choice in range(16)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**64 for seed in seeds)


def test_forks_differ_in_key_and_seed_alone() -> None:
    sampling = Sampling(0.7, 5, 0.9, 0.1, seed=3)
    submit = Submit(7, [1, 2], sampling, 9, 2, [4], 1, 100, 200, prompt_logprobs=2, priority=-3, cache_salt="s")
    forks = fork(submit, [8, 9])
    assert [(each.key, each.fork_of, each.sampling.seed) for each in forks] == [
        (8, 7, choice_seed(3, 1)),
        (9, 7, choice_seed(3, 2)),
    ]
    for each in forks:
        assert (each.token_ids, each.max_tokens, each.min_tokens, each.stop_token_ids, each.logprobs) == ([1, 2], 9, 2, [4], 1)
        assert (each.priority, each.cache_salt, each.deadline_ns, each.prompt_logprobs) == (-3, "s", 200, -1)
        assert (each.sampling.temperature, each.sampling.top_k) == (0.7, 5)
