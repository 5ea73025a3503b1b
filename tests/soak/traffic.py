"""What clients do in a soak: requests of every kind, each with what may become of it, and its answer beside the one that must come.

The echo engine counts up from a prompt's last id, so that every answer is known beforehand, to its last id.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.rpc import error_details_pb2

from inference.v1 import generate_pb2 as pb
from inference.v1.inference_pb2_grpc import InferenceServiceStub
from tests.faults.toxic import through, toxic
from tests.service.conftest import RunningServer
from tests.service.test_generate import detail, request

TIMEOUT_S = 60.0
REFUSED = {"RESOURCE_EXHAUSTED QUEUE_FULL", "RESOURCE_EXHAUSTED KV_OVERCOMMITTED"}
"""What may become of any request under overload."""
PREFIXES = [list(range(1000 * n, 1000 * n + 40)) for n in range(1, 5)]
"""Beginnings that many prompts have in common."""
REGEX = "[a-c]{4}"
CHOICES = ["yes", "no", "perhaps"]


@dataclass
class Answer:
    """What came of a request, by choice."""

    status: str = "OK"
    """Or the code's name, and the reason where the server gave one."""
    ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    text: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    ends: dict[int, pb.Finished] = field(default_factory=dict)

    def take(self, event: pb.GenerateResponse) -> None:
        if event.HasField("delta"):
            self.ids[event.delta.index] += event.delta.token_ids
            self.text[event.delta.index] += event.delta.text
        elif event.HasField("finished"):
            assert event.finished.index not in self.ends, "a choice has ended twice"
            self.ends[event.finished.index] = event.finished

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.ids.values())


@dataclass
class Client:
    """One request: how it is made, and with what chances."""

    server: RunningServer
    number: int
    chance: random.Random

    def prompt(self) -> list[int]:
        """Some 1 to 90 ids; half of them begin as others do."""
        own = [self.chance.randrange(5000, 9000) for _ in range(self.chance.choice([1, 3, 20, 50]))]
        return [*(self.chance.choice(PREFIXES) if self.chance.random() < 0.5 else []), *own]

    def made(self, max_tokens: int = 0, **fields: Any) -> pb.GenerateRequest:
        salt = self.chance.choice(["", "", "salt"])
        return request(
            self.prompt(),
            max_tokens or self.chance.randint(1, 40),
            request_id=f"soak {self.number}",
            priority=self.chance.choice([0, 0, 1]),
            cache_salt=salt,
            **fields,
        )

    @contextmanager
    def begun(
        self, made: pb.GenerateRequest, timeout_s: float = TIMEOUT_S, server: RunningServer | None = None
    ) -> Iterator[tuple[InferenceServiceStub, Any]]:
        """The request, on a connection of its own."""
        with (server or self.server).stub() as stub:
            yield stub, stub.Generate(made, timeout=timeout_s)


def read(call: Any, pause_s: float = 0.0) -> Answer:
    """To the end, with a pause after each message."""
    answer = Answer()
    try:
        for event in call:
            answer.take(event)
            time.sleep(pause_s)
    except grpc.RpcError as error:
        answer.status = status_of(error)
    return answer


def status_of(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    info = detail(error, error_details_pb2.ErrorInfo) if dict(error.trailing_metadata() or ()).get("grpc-status-details-bin") else None
    return f"{error.code().name} {info.reason}" if info else str(error.code().name)


# --- what a client does; each gives what it asked for and what it got ---

Exchange = tuple[pb.GenerateRequest, Answer]


def plain(client: Client) -> Exchange:
    made = client.made()
    with client.begun(made) as (_, call):
        return made, read(call)


def choices(client: Client) -> Exchange:
    made = client.made(sampling=pb.SamplingParams(n=client.chance.randint(2, 4)))
    with client.begun(made) as (_, call):
        return made, read(call)


def slow_reader(client: Client) -> Exchange:
    made = client.made(40)
    with client.begun(made) as (_, call):
        return made, read(call, 0.05)


def stuck_reader(client: Client) -> Exchange:
    """Takes one message, and no other until the server must have lost patience; gRPC's windows on the way stay small."""
    made = client.made(600, sampling=pb.SamplingParams(n=4), output=pb.OutputOptions(logprobs=1))
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    with grpc.insecure_channel(client.server.address, options=options) as channel:
        call: Any = InferenceServiceStub(channel).Generate(made, timeout=TIMEOUT_S)
        answer = Answer()
        try:
            answer.take(next(call))
            time.sleep(20.0)
            for event in call:
                answer.take(event)
        except grpc.RpcError as error:
            answer.status = status_of(error)
        return made, answer


def structured(client: Client) -> Exchange:
    constraint = client.chance.choice([pb.StructuredOutput(regex=REGEX), pb.StructuredOutput(choices=pb.Choices(values=CHOICES))])
    made = client.made(30, structured_output=constraint)
    with client.begun(made) as (_, call):
        return made, read(call)


def aborted(client: Client) -> Exchange:
    made = client.made(60)
    with client.begun(made) as (_, call):
        time.sleep(client.chance.uniform(0, 0.6))
        # A front end that has just died aborts nothing; then the answer goes on.
        with client.server.stub() as other, suppress(grpc.RpcError):
            other.Abort(pb.AbortRequest(request_id=made.request_id), timeout=TIMEOUT_S)
        return made, read(call)


def cancelled(client: Client) -> Exchange:
    made = client.made(60)
    with client.begun(made) as (_, call):
        time.sleep(client.chance.uniform(0, 0.6))
        call.cancel()
        return made, read(call)


def expired(client: Client) -> Exchange:
    made = client.made(60)
    with client.begun(made, client.chance.uniform(0.005, 0.8)) as (_, call):
        return made, read(call)


def cut_off(client: Client) -> Exchange:
    """Its connection is closed, reset, or falls silent, at any byte of the answer."""
    made = client.made(60)
    with toxic(client.server) as proxy:
        how = client.chance.choice(["closed", "reset", "silent"])
        proxy.resets = how == "reset"
        if how != "silent":
            proxy.downstream_bytes = client.chance.randrange(20, 2500)
        with client.begun(made, 2.0 if how == "silent" else TIMEOUT_S, through(proxy, client.server)) as (_, call):
            if how == "silent":
                time.sleep(client.chance.uniform(0, 0.6))
                proxy.stall()
            return made, read(call)


def duplicate(client: Client) -> Exchange:
    """A second request of the same id; the first one's answer is looked at."""
    made = client.made(40)
    with client.begun(made) as (_, call), client.begun(made) as (_, second):
        answer, other = read(call), read(second)
        assert "OK" not in (answer.status, other.status) or not overlap(answer, other), "an id was in flight twice"
        return made, answer


def overlap(one: Answer, other: Answer) -> bool:
    """Whether the engine computed both at the same time, by its own clock."""
    if not (one.ends and other.ends):
        return False
    a, b = one.ends[0].timings, other.ends[0].timings
    return max(a.scheduled_unix_ns, b.scheduled_unix_ns) < min(a.last_token_unix_ns, b.last_token_unix_ns)


def invalid(client: Client) -> Exchange:
    made = client.made(sampling=pb.SamplingParams(temperature=-1))
    with client.begun(made) as (_, call):
        return made, read(call)


@dataclass(frozen=True)
class Kind:
    """A way to be a client: how often, and the statuses that may come of it besides OK and REFUSED."""

    run: Callable[[Client], Exchange]
    weight: float
    statuses: frozenset[str] = frozenset()


def kind(run: Callable[[Client], Exchange], weight: float, *statuses: str) -> Kind:
    return Kind(run, weight, frozenset(statuses))


EXPIRED = ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED DEADLINE_UNREACHABLE")
KINDS = [
    kind(plain, 30),
    kind(choices, 10),
    kind(slow_reader, 5),
    kind(stuck_reader, 0.25, "RESOURCE_EXHAUSTED STUCK_READER"),
    kind(structured, 6),
    kind(aborted, 10),
    kind(cancelled, 10, "CANCELLED"),
    kind(expired, 10, *EXPIRED),
    kind(cut_off, 8, "UNAVAILABLE", *EXPIRED),
    kind(duplicate, 4, "ALREADY_EXISTS REQUEST_IN_FLIGHT"),
    kind(invalid, 2, "INVALID_ARGUMENT INVALID_FIELD"),
]


def fault(made: pb.GenerateRequest, answer: Answer) -> str:
    """What is wrong with an answer; "" for nothing. Whatever ended it, no token is lost, and none comes twice."""
    if answer.status == "OK" and set(answer.ends) != set(range(made.sampling.n or 1)):
        return f"OK, with the choices {sorted(answer.ends)} ended"
    for index, ids in answer.ids.items():
        end = answer.ends.get(index)
        if end is not None and end.usage.completion_tokens != len(ids) + (end.HasField("stop_token_id")):
            return f"choice {index}: {end.usage.completion_tokens} tokens by its usage, {len(ids)} came"
        if made.HasField("structured_output"):
            if end is not None and end.reason == pb.FINISH_REASON_STOP and not fits(made.structured_output, answer.text[index]):
                return f"choice {index}: {answer.text[index]!r} is not what {made.structured_output} demands"
            continue
        first = made.token_ids.ids[-1] + 1
        if ids != list(range(first, first + len(ids))):
            return f"choice {index} after {first - 1}: {ids}"
        if end is not None and end.reason == pb.FINISH_REASON_LENGTH and len(ids) != made.stopping.max_tokens:
            return f"choice {index}: {len(ids)} tokens of {made.stopping.max_tokens}, and the reason is length"
    if any(end.reason == pb.FINISH_REASON_STOP for end in answer.ends.values()) and not made.HasField("structured_output"):
        return "an answer has stopped by itself"
    return ""


def fits(constraint: pb.StructuredOutput, text: str) -> bool:
    return text in CHOICES if constraint.HasField("choices") else bool(re.fullmatch(REGEX, text))
