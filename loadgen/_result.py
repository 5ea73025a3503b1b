"""The result of a run: what the JSON file holds, and what the end table, the report and the web UI show.

Latencies are milliseconds, rates are a second. None is "nothing was measured": 0 would look like a very good figure.
`read_result` turns the file back into these structs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

VERSION = 1


class Spread(msgspec.Struct, kw_only=True, rename={"p99_9": "p99.9"}):
    """The distribution of one measure: nearest-rank percentiles within 0.05 % of the raw values; count, mean and max are exact."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    p99_9: float | None = None
    max: float | None = None


class Requests(msgspec.Struct, kw_only=True):
    """Requests by what became of them within the window, and while the level drained for those sent in it."""

    completed: int
    failed: int
    cut_off: int
    """Still streaming at the end, and cancelled: neither completed nor failed."""
    good: int
    """Completed, and within every limit of `slo`."""
    completed_per_s: float
    good_per_s: float
    """The goodput."""


class Errors(msgspec.Struct):
    """Failed requests of one class."""

    count: int
    example: str
    """What the first of them said."""


class Tokens(msgspec.Struct, kw_only=True):
    """Tokens within the window."""

    input: int
    """Of prompts whose first output token came in the window."""
    cached: int
    """Of these, found in the server's prefix cache."""
    output: int
    input_per_s: float
    output_per_s: float


class ClientCpu(msgspec.Struct, kw_only=True):
    """Shares of a core that the load generator's processes used."""

    mean: float | None
    busiest: float
    """The largest of any process between two of its reports, a second apart."""


class Client(msgspec.Struct, kw_only=True):
    """The load generator itself."""

    processes: int
    streams: int
    """The most streams that one process had open at once."""
    messages_per_s: float
    """Received by all processes together: those with tokens."""


class Slo(msgspec.Struct, kw_only=True):
    """How many of a level's requests, failed ones included, were within every limit of `loadtest.slo`."""

    share: float | None
    """None: no request ended."""
    met: bool


class Verdict(msgspec.Struct, kw_only=True):
    """Whether the load generator did what it was told to, so that its figures are those of the server."""

    trusted: bool
    reasons: list[str] = []
    """Why not."""


class Steady(msgspec.Struct, kw_only=True):
    """The window's first half against its second: a level that still warms up, or whose queue grows, has no one figure."""

    steady: bool | None
    """None: too short to tell."""
    output_tokens_per_s: tuple[float, float] | None = None
    ttft_ms: tuple[float, float] | None = None
    """The means of requests whose first token came in each half."""
    reasons: list[str] = []


class Second(msgspec.Struct, kw_only=True):
    """One second of a window, numbered from 0 at its opening."""

    second: int
    sent: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    """Mean over first tokens that came in it."""
    itl_ms: float | None = None
    """Mean over gaps that ended in it."""
    itl_max_ms: float | None = None


Cdf = list[tuple[float, float]]
"""(milliseconds, share of samples that took at most so long), both rising; the last share is 1."""


class Level(msgspec.Struct, kw_only=True):
    """One level of load: one window with its own warm-up and drain."""

    name: str
    """Such as "concurrency 8" or "2.5 requests/s #2" (its second repeat); unique within a run."""
    concurrency: int
    """Users of a closed loop; 0: an open loop."""
    rate: float | None
    """Requests a second asked for; of a trace, times its own pace. None: a closed loop."""
    repeat: int
    """From 0."""
    began_unix_ns: int
    """When the window opened; 0: never."""
    duration_s: float
    """Of the window."""
    mean_in_flight: float
    """The concurrency reached."""
    requests: Requests
    errors: dict[str, Errors]
    tokens: Tokens
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    """These four count from the sending."""
    scheduled_ttft_ms: Spread
    scheduled_e2e_ms: Spread
    """These two count from when the request was due, and so hold what it waited for the load generator. Empty in a closed loop."""
    schedule_lag_ms: Spread
    """From when a request was due to its sending. Empty in a closed loop."""
    queue_ms: Spread
    """What the service says that requests waited in its queue. Empty where it does not say."""
    server_ttft_ms: Spread
    """TTFT as the service saw it, from the request's arrival. Empty where it does not say."""
    user_tokens_per_s: Spread
    """1 / TPOT, one sample a request: the pace that a reader sees."""
    receive_lag_ms: Spread
    """What a message that comes at any moment waits for its process to look at it."""
    client: Client
    client_cpu: ClientCpu
    slo: Slo | None
    """None: no limit is set."""
    steady: Steady
    verdict: Verdict
    seconds: list[Second]
    cdf: dict[str, Cdf]
    """By the names of the spreads above, such as "ttft_ms"; those with samples only."""


class Interval(msgspec.Struct, kw_only=True):
    """The mean over repeats, and its 95 % confidence interval (Student's t)."""

    mean: float
    low: float
    high: float
    samples: int


class Repeated(msgspec.Struct, kw_only=True):
    """A level over its repeats."""

    concurrency: int
    rate: float | None
    figures: dict[str, Interval]
    """By path in Level, such as "ttft_ms.p50" or "tokens.output_per_s"; those that at least two repeats have."""


class Search(msgspec.Struct, kw_only=True):
    """What a search for the highest load within the SLO found."""

    best: float | None
    """Concurrency or rate. None: not even the lowest met it."""


class Result(msgspec.Struct, kw_only=True):
    """A whole run."""

    version: int = VERSION
    target: str
    protocol: str
    """Such as "grpc"; "" where no request was made."""
    model: str
    began_unix_ns: int
    loadtest: dict[str, Any]
    """The section of the YAML file as it was in force: workload, seed, arrival, levels, slo, timeout and all."""
    levels: list[Level]
    """In the order in which they ran."""
    repeated: list[Repeated]
    """One for each level that ran more than once."""
    search: Search | None
    verdict: Verdict
    """Of all levels."""


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request, as a line of JSON. Times are nanoseconds since the Unix epoch; 0 is "never"."""

    level: str
    number: int
    """The request's in the run; all turns of a conversation have the same."""
    turn: int
    """From 0."""
    process: int
    """From 0."""
    trace_id: str
    """Empty where the request was not traced."""
    scheduled_unix_ns: int
    """0: a closed loop."""
    sent_unix_ns: int
    first_token_unix_ns: int
    last_token_unix_ns: int
    ended_unix_ns: int
    outcome: str
    """completed, cut_off, or the class of its error."""
    error: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    messages: list[tuple[int, int]]
    """(nanoseconds after sending, tokens) of each message that brought tokens."""
    queue_ns: int
    server_ttft_ns: int
    """As the service says; 0: it does not."""


def read_result(path: str | Path) -> Result:
    """Raises OSError, and msgspec.MsgspecError where it is no result of this version."""
    result = msgspec.json.decode(Path(path).read_bytes(), type=Result)
    if result.version != VERSION:
        raise msgspec.ValidationError(f"{path}: a result of version {result.version}, but this is version {VERSION}")
    return result
