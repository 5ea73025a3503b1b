"""A request inside the engine."""

from __future__ import annotations

from inference_service.engine.bad_words import BadWords
from inference_service.engine.forks import SharedPrompt
from inference_service.engine.grammars import Guide
from inference_service.engine.prefix_cache import Node
from inference_service.messages import Submit, TokenLogprobs


class Request:
    """One sequence: its tokens, how far they are computed, and the pages that hold their keys and values.

    `tokens` are those that the host knows. One more may be in flight: sampled by a step whose result has not arrived, and so only on the
    device. `computed` counts the tokens whose keys and values are in the pages once all launched steps have run.
    """

    __slots__ = (
        "bad_words",
        "cached_tokens",
        "computed",
        "decodes",
        "done",
        "forks",
        "guide",
        "in_flight",
        "is_plain",
        "max_length",
        "min_length",
        "node",
        "origin",
        "pages",
        "parent",
        "parked",
        "preemptions",
        "prompt_scored",
        "prompt_tokens",
        "published",
        "rank",
        "reported",
        "scheduled_ns",
        "shared",
        "slot",
        "stop_ids",
        "submit",
        "tokens",
    )

    def __init__(self, submit: Submit, origin: bytes = b"", rank: tuple[int, int] = (0, 0)) -> None:
        self.submit = submit
        self.origin = origin
        """The front end that sent it."""
        self.rank = rank
        """Its place in the order in which requests get their turn; the second number is its own alone."""
        self.tokens = list(submit.token_ids)
        # Numbers, not properties: each is asked for every row of every step.
        self.prompt_tokens = len(submit.token_ids)
        self.min_length = self.prompt_tokens + submit.min_tokens
        """Of the sequence, below which no stop token is drawn."""
        self.max_length = self.prompt_tokens + submit.max_tokens
        self.stop_ids = frozenset(submit.stop_token_ids)
        self.bad_words = BadWords(submit.sampling.bad_words) if submit.sampling.bad_words else None
        self.is_plain = (
            submit.logprobs < 0
            and submit.prompt_logprobs < 0
            and submit.grammar is None
            and self.bad_words is None
            and not submit.sampling.changes_logits
        )
        """Whether its rows are, but for what `min_tokens` bans."""
        self.prompt_scored = 0
        """Prompt tokens whose log-probabilities the front end has."""
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
        self.guide: Guide | None = None
        """Where its answer stands in its grammar; None: it has no grammar."""
        self.parked = False
        """Whether it waits outside of the queue: for its grammar to be compiled, or, once preempted, for a mask."""
        self.forks: list[Request] = []
        """Other choices that wait until this one's prompt is computed."""
        self.parent: Request | None = None
        """The choice whose fork this one waits to be."""
        self.shared: SharedPrompt | None = None
        """What a fork in the queue takes over when its turn comes."""

    @property
    def prefill(self) -> int:
        """Tokens to compute before it decodes; the same for as long as it waits."""
        return 1 if self.shared else self.prompt_tokens

    @property
    def lacks_mask(self) -> bool:
        """Whether its next token cannot be drawn yet, since the grammar's mask depends on one that is not known, or not worked in."""
        return self.guide is not None and (self.in_flight > 0 or not self.guide.ready)

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be told: then its tokens must be computed, wherever their pages are."""
        return self.submit.prompt_logprobs >= 0 and self.prompt_scored < self.prompt_tokens - 1

    def take_scores(self, start: int, scores: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Of the scores of the tokens that follow `start` and those after it, the ones that the front end has not got before."""
        new = scores[max(0, self.prompt_scored - start) :]
        self.prompt_scored += len(new)
        return new

    @property
    def length(self) -> int:
        """Tokens of the sequence, the one in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def is_complete(self) -> bool:
        """Whether the token limit is reached, counting the one in flight: nothing is left to compute."""
        return self.length >= self.max_length

    def __repr__(self) -> str:
        return f"Request({self.submit.key}, {self.computed}/{self.length} computed, {len(self.pages)} pages)"
