"""The section `loadtest` of the configuration: what the load generator asks for, how often, and what it reports."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from inference_service.sections import Count, CountOrAuto, Milliseconds, PositiveSeconds, Rate, Seconds, Section


class Lengths(Section, frozen=True):
    """Numbers that differ from request to request."""

    min: Count
    max: Count
    """What falls beyond the bounds is set to them."""
    distribution: Literal["uniform", "normal", "lognormal"] = "uniform"
    mean: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Of the lengths, not of their logarithms, before the bounds; so is std. uniform needs neither."""
    std: Annotated[float, Meta(ge=0, le=1e9)] = 0.0

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"min is {self.min}, but max is {self.max}")
        if (self.distribution == "uniform") == (self.mean > 0):
            raise ValueError(f"distribution {self.distribution} {'has no mean' if self.mean else 'needs a mean'}")


class Workload(Section, frozen=True):
    """What the load generator's requests look like."""

    prompt: Literal["token_ids", "text"] = "token_ids"
    """Text is for targets that take nothing else, and for chat: words that are one token each for `tokenizer`."""
    tokenizer: str = ""
    """Whose words, and who counts the tokens of a file's texts; found as model.path is. Empty: that of model.path."""
    input_tokens: Count | Lengths = 128
    """Of a prompt; in a conversation, of what each turn adds to it."""
    output_tokens: Count | Lengths = 64
    exact_output: bool = True
    """The answer is exactly so long, whatever the model says; else it may be shorter."""
    prefix_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of input_tokens, the share at the prompt's beginning that all prompts of a group have in common."""
    prefix_groups: Count = 1
    turns: Count | Lengths = 1
    """Of a conversation: each turn's prompt is the one before it, the answer received to that, and what it adds."""
    file: str = ""
    """Prompts of a file instead of random ones: .json as ShareGPT has them, else JSON lines; docs/load-testing.md has the format."""
    file_max_tokens: CountOrAuto = 0
    """Leave out what is longer than this in the file, prompts and answers together. 0: take all."""
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: CountOrAuto = 0
    """0: of all tokens."""
    seeded: bool = True
    """Each request brings a seed, so that a sampled answer can be had again. Some servers sample such rows more slowly."""
    vocab_size: CountOrAuto = 0
    """Prompts are of token ids below it. 0: the model's vocabulary without its end-of-sequence ids, where the target tells them."""


class Part(Section, frozen=True):
    """A workload that takes a share of the requests."""

    share: Annotated[float, Meta(gt=0, lt=1)]
    workload: Workload


class Slo(Section, frozen=True):
    """What a request must keep to be a good one. A limit of 0 is none."""

    ttft_ms: Milliseconds = 0.0
    tpot_ms: Milliseconds = 0.0
    e2e_ms: Milliseconds = 0.0
    share: Annotated[float, Meta(gt=0, le=1)] = 0.99
    """Of a level's requests, failed ones included, that must be good; a run with fewer has exit status 3."""

    @property
    def is_set(self) -> bool:
        return bool(self.ttft_ms or self.tpot_ms or self.e2e_ms)


class Loadtest(Section, frozen=True):
    """The load test."""

    target: str = "grpc://127.0.0.1:50051"
    arrival: Literal["closed", "constant", "poisson", "trace"] = "closed"
    """closed: users, each of whom sends a request as soon as the one before it has ended. Else requests come when they are due, whatever
    became of those before: evenly, at random, or as a trace says."""
    concurrency: Annotated[tuple[Count, ...], Meta(min_length=1)] = (4,)
    """Users of a closed loop; each number is a level of its own, one after the other."""
    rate: Annotated[tuple[Rate, ...], Meta(min_length=1)] = (1.0,)
    """Else: requests a second, or how many times faster than it was the trace is replayed; each number is a level."""
    stages: tuple[tuple[Seconds, Annotated[float, Meta(ge=0, le=1e6)]], ...] = ()
    """How `rate` changes in a level: [seconds, factor] moves the factor linearly to that value in so long, and after the last stage they
    begin again. Empty: it stays."""
    trace: str = ""
    """JSON lines with timestamp (ms), input_length, output_length and hash_ids, as Mooncake publishes them."""
    search: bool = False
    """Find the highest load between the least and the largest level that meets `slo`, by bisection."""
    repeats: Count = 1
    """How often each level is run, for confidence intervals."""
    duration_s: PositiveSeconds = 20.0
    """Of each level's window. A trace lasts as long as it does."""
    requests: CountOrAuto = 0
    """End a level when so many requests have ended in the window, if duration_s has not passed before."""
    warmup_requests: CountOrAuto = 0
    """Requests of each user, on average, that come before a level's window opens."""
    warmup_s: Seconds = 0.0
    """Nor does the window open before the level is so old."""
    drain_s: Seconds = 30.0
    """How long requests in flight at a window's end may go on; then they are cut off."""
    slo: Slo = Slo()
    workload: Workload = Workload()
    mixture: tuple[Part, ...] = ()
    """Other workloads, which come at random among the requests of `workload`, each with its share."""
    seed: int = 0
    timeout_s: PositiveSeconds = 120.0
    """Deadline of each request."""
    trace_file: str = "loadgen-traces.jsonl"
    """JSON lines, one client span a request; used where no OTLP endpoint is set."""
    json_file: str = ""
    """Where the result goes as JSON. Empty: to the terminal alone, as a table."""
    html_file: str = ""
    """Where it goes as a page with figures. Empty: nowhere."""
    requests_file: str = ""
    """Where each request goes as a line of JSON. Empty: nowhere."""
