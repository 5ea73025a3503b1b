"""Names of requests over all front ends: what is a second request, and what another choice of the first."""

from __future__ import annotations

from inference_service.engine.in_flight import InFlight
from inference_service.engine.requests import Request
from inference_service.messages import Sampling, Submit


def make(origin: bytes, key: int, request_id: str, fork_of: int = -1) -> Request:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0)
    return Request(Submit(key, [1], sampling, 8, 0, [], -1, 0, 0, fork_of=fork_of, request_id=request_id), origin)


def test_choices_share_a_name_and_other_requests_do_not() -> None:
    requests = InFlight()
    first, fork = make(b"a", 1, "x"), make(b"a", 2, "x", fork_of=1)
    assert requests.add(first) and requests.add(fork)
    for other in (make(b"b", 1, "x"), make(b"a", 3, "x"), make(b"b", 2, "x", fork_of=1)):
        assert not requests.add(other)
    assert requests.named("x") == list(requests) == [first, fork]
    requests.remove(first)
    assert not requests.add(make(b"b", 1, "x")), "a choice is still in flight"
    requests.remove(fork)
    assert requests.named("x") == [] and len(requests) == 0
    assert requests.add(make(b"b", 1, "x"))


def test_requests_without_a_name_are_told_apart_by_key_and_belong_to_their_front_end() -> None:
    requests = InFlight()
    mine, others = [make(b"a", key, "") for key in range(3)], [make(b"b", key, "") for key in range(3)]
    assert all(requests.add(request) for request in [*mine, *others])
    assert requests.of(b"a") == mine and requests.get(b"b", 2) is others[2] and requests.named("") == []
