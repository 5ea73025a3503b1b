"""Hundreds of requests that are aborted, cancelled or given up, at any moment of their lives."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from inference.v1 import generate_pb2 as pb
from tests.faults.leaks import Leaks
from tests.service.conftest import RunningServer, run_server
from tests.service.test_generate import request
from tests.service.test_lifecycle import API, PACED, SERVING, health, started

REQUESTS, CLIENTS = 300, 12
ENDS = ("abort", "cancel", "deadline", "finish")


@pytest.fixture(scope="module", params=[1, 2], ids=["one front end", "two front ends"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    settings = (
        *PACED,
        "model.echo_step_ms=2",
        "batch.max_requests=6",
        "cache.pages=200",
        "telemetry.metrics_port=0",
        f"server.workers={request.param}",
    )
    with run_server(tmp_path_factory.mktemp("storm"), *settings) as server:
        yield server


def one(server: RunningServer, number: int) -> tuple[str, list[int], grpc.StatusCode | None]:
    """A request that ends as its number says: how, its ids, and the status unless OK."""
    chance = random.Random(number)
    end, request_id = ENDS[number % len(ENDS)], f"storm {number}"
    made = request([100, 200 + number], 40, request_id=request_id)
    if chance.random() < 0.3:
        made.sampling.n = 2
    ids: list[int] = []
    with server.stub() as stub:
        call = stub.Generate(made, timeout=chance.uniform(0.005, 0.2) if end == "deadline" else 60)
        if end in ("abort", "cancel"):
            time.sleep(chance.choice([0, chance.uniform(0, 0.2)]))
            if end == "cancel":
                call.cancel()
            else:
                stub.Abort(pb.AbortRequest(request_id=request_id), timeout=60)
        try:
            for event in call:
                if event.HasField("delta") and event.delta.index == 0:
                    ids += event.delta.token_ids
        except grpc.RpcError as error:
            return end, ids, error.code()
    return end, ids, None


def test_a_storm_of_aborts_leaves_nothing_behind(server: RunningServer) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(lambda number: one(server, number), range(3 * CLIENTS)))
        leaks = Leaks(server)
        results = list(clients.map(lambda number: one(server, number), range(REQUESTS)))
    codes: dict[str, set[grpc.StatusCode | None]] = {
        "abort": {None},
        "finish": {None},
        "cancel": {None, grpc.StatusCode.CANCELLED},
        "deadline": {None, grpc.StatusCode.DEADLINE_EXCEEDED},
    }
    for number, (end, ids, code) in enumerate(results):
        assert code in codes[end], (end, code)
        assert ids == list(range(201 + number, 201 + number + len(ids))), "no token is lost, none comes twice"
        assert len(ids) == 40 or end != "finish"
    leaks.assert_back()
    assert health(server, "") == health(server, API) == SERVING
    assert started(server, request([100], 5)).result().ids == [101, 102, 103, 104, 105]
