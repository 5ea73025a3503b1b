"""A request inside the engine."""

from __future__ import annotations

from inference_service.engine.prefix_cache import Node
from inference_service.messages import Submit


class Request:
    """One sequence: its tokens, how far they are computed, and the pages that hold their keys and values.

    `tokens` are those that the host knows. One more may be in flight: sampled by a step whose result has not arrived, and so only on the
    device. `computed` counts the tokens whose keys and values are in the pages once all launched steps have run.
    """

    __slots__ = (
        "cached_tokens",
        "computed",
        "decodes",
        "done",
        "in_flight",
        "node",
        "origin",
        "pages",
        "preemptions",
        "published",
        "reported",
        "scheduled_ns",
        "slot",
        "stop_ids",
        "submit",
        "tokens",
    )

    def __init__(self, submit: Submit, origin: bytes = b"") -> None:
        self.submit = submit
        self.origin = origin
        """The front end that sent it."""
        self.tokens = list(submit.token_ids)
        self.stop_ids = frozenset(submit.stop_token_ids)
        self.computed = 0
        self.in_flight = 0
        self.decodes = False
        """Whether the device has the last token in the request's slot."""
        self.slot = -1
        self.pages: list[int] = []
        self.published = 0
        """Leading pages that are in the prefix tree."""
        self.node: Node | None = None
        """The last of them."""
        self.cached_tokens = 0
        self.scheduled_ns = 0
        self.reported = False
        """Whether the front end knows that the request was scheduled."""
        self.preemptions = 0
        self.done = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.submit.token_ids)

    @property
    def length(self) -> int:
        """Tokens of the sequence, the one in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def output_length(self) -> int:
        return self.length - self.prompt_tokens

    @property
    def is_complete(self) -> bool:
        """Whether the token limit is reached, counting the one in flight: nothing is left to compute."""
        return self.output_length >= self.submit.max_tokens

    def __repr__(self) -> str:
        return f"Request({self.submit.key}, {self.computed}/{self.length} computed, {len(self.pages)} pages)"
