"""The section `comparison` of the configuration: what `python -m baselines.compare` compares, and how."""

from __future__ import annotations

from typing import Literal

import msgspec

from inference_service.sections import Count, PositiveSeconds, Seconds, Section


class Endpoint(Section, frozen=True):
    """A server that takes part in a comparison."""

    url: str
    """What the load generator calls its target."""
    peer: Literal["", "ours", "vllm", "tensorrt_llm", "sglang", "lmdeploy", "lorax", "llama_cpp", "tgi"] = ""
    """Whose server it is: the command that starts it is then made of this file's settings. Empty: that of `serve`, or it runs already."""
    program: str = ""
    """The Python that has the peer's package, or the peer's executable. Empty: this Python, or what is found on the path."""
    model: str = ""
    """The model in the peer's own form, such as a GGUF file. Empty: model.path."""
    arguments: str = ""
    """More of them, at the end of the command."""
    serve: str = ""
    """A command that goes before the peer's, in which {python}, {model} and {file} stand for this Python, model.path and the YAML file's
    path."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Set in its environment."""
    ready_s: PositiveSeconds = 600.0
    """How long it may take to start."""
    probe: str = ""
    """A command run after each cell, which prints a JSON object with more of its figures, such as {"distinct_experts": 61.2};
    {python} and {concurrency} stand for this Python and the cell's concurrency."""


class Comparison(Section, frozen=True):
    """What `python -m baselines.compare` compares, and how."""

    targets: dict[str, Endpoint] = msgspec.field(default_factory=dict)
    cells: str = "128/256@1,8,32"
    """Input / output tokens @ concurrencies, and more of them after spaces; docs/baselines.md has the grammar."""
    window_s: tuple[PositiveSeconds, PositiveSeconds] = (8.0, 16.0)
    """How long a cell is measured: at concurrency 1, and at 256; between, by the logarithm."""
    processes: Count = 8
    """Most load generator processes; 4 or more for a concurrency of 4 or more."""
    repeats: Count = 1
    """Of each cell, one after the other within a start of the server, for confidence intervals."""
    interleave: bool | Literal["auto"] = "auto"
    """Whether all servers are up at once and each cell goes from one to the next. Else they run in blocks: the first, each other, the first
    again. auto: where all fit into memory."""
    rehearsal_s: Seconds = 0.0
    """For how long each cell is run unmeasured after each start, so that no kernel is compiled within a window. 0: not at all."""
    traces: bool = False
    """Collects the servers' own traces, where they have some; it costs them time."""
