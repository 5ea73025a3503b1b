"""Joins detokenizing and stop strings for one choice: token ids go in, pieces to stream come out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from inference_service.messages import TokenLogprobs
from inference_service.text.detokenizer import Detokenizer
from inference_service.text.stopping import StopMatcher


@dataclass(slots=True)
class Piece:
    """What to stream: the lists have one entry a token id, and the tokens are those whose text ends with this piece's text."""

    token_ids: list[int]
    text: str
    times_ns: list[int]
    logprobs: list[TokenLogprobs] | None = None
    stop: str | None = None
    """The stop string that ended the answer here."""
    unused: int = 0
    """With `stop`: how many of the tokens pushed last came after it."""


class Assembler:
    """One choice's way from ids to text.

    Ids and text are held together: an id goes out with the text that ends its token. When a stop string matches, the text before it goes
    out, with the ids of tokens that end before it; tokens that lie in it, even partly, never do.
    """

    __slots__ = ("_detokenizer", "_ends", "_ids", "_logprobs", "_matcher", "_sent", "_stopped", "_times", "_total", "_unmatched_tokens")

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """`stop`: strings that end the answer, none empty; one that ends within the first `min_tokens` tokens' text does not."""
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop) if stop else None
        self._unmatched_tokens = min_tokens
        self._stopped = False
        # Tokens held back, and, with stop strings, where their texts end (as far as they have), in characters of the whole answer.
        self._ids: list[int] = []
        self._times: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._ends: list[int] = []
        self._total = 0
        self._sent = 0

    def push(self, token_ids: list[int], times_ns: list[int], logprobs: list[TokenLogprobs] | None = None) -> Piece | None:
        """New tokens, with one time and, when asked for, one log-probability each. None: nothing to stream. Ignored after a match."""
        if self._matcher is not None:
            return None if self._stopped else self._push_matching(self._matcher, token_ids, times_ns, logprobs)
        text = self._detokenizer.push(token_ids)
        held = self._detokenizer.held_tokens
        if not held and not self._ids:
            return Piece(token_ids, text, times_ns, logprobs) if token_ids else None
        self._ids += token_ids
        self._times += times_ns
        self._logprobs += logprobs or ()
        return self._take(len(self._ids) - held, text)

    def finish(self) -> Piece | None:
        """At the end of the tokens: what is held. A stop string may match even here, when bytes become text at last."""
        if self._stopped:
            return None
        text = self._detokenizer.flush()
        if self._matcher is None:
            return self._take(len(self._ids), text)
        certain, stop = self._match(self._matcher, text)
        if stop is not None:
            return self._stop(certain, stop)
        return self._take(len(self._ids), certain + self._matcher.flush())

    def _push_matching(
        self, matcher: StopMatcher, token_ids: list[int], times_ns: list[int], logprobs: list[TokenLogprobs] | None
    ) -> Piece | None:
        self._times += times_ns
        self._logprobs += logprobs or ()
        text = ""
        for place, token_id in enumerate(token_ids):
            self._ids.append(token_id)
            self._unmatched_tokens -= 1
            certain, stop = self._match(matcher, self._detokenizer.push((token_id,)))
            text += certain
            if stop is not None:
                piece = self._stop(text, stop)
                piece.unused = len(token_ids) - place - 1
                return piece
        return self._take(bisect_right(self._ends, self._sent), text)

    def _match(self, matcher: StopMatcher, text: str) -> tuple[str, str | None]:
        """Feed the newest token's text on; gives the text that is certain now, and the stop string that matched."""
        self._end_tokens(text)
        certain, stop = matcher.push(text, self._unmatched_tokens < 0)
        self._sent += len(certain)
        return certain, stop

    def _end_tokens(self, text: str) -> None:
        """Note where the tokens end that `text` completes: those held until now, and the newest one unless it is held itself."""
        begin = self._total
        self._total += len(text)
        held = self._detokenizer.held_tokens
        ended = len(self._ids) - held - len(self._ends)
        if ended <= 0:
            return
        held_end = begin + 1 if self._detokenizer.holds_one_character else self._total
        self._ends += [held_end] * (ended - 1) + [held_end if held else self._total]

    def _stop(self, text: str, stop: str) -> Piece:
        self._stopped = True
        piece = self._take(bisect_right(self._ends, self._sent), text) or Piece([], "", [])
        piece.stop = stop
        return piece

    def _take(self, count: int, text: str) -> Piece | None:
        """A piece of the first `count` tokens held, and `text`."""
        if not count and not text:
            return None
        piece = Piece(self._ids[:count], text, self._times[:count], self._logprobs[:count] or None)
        del self._ids[:count], self._times[:count], self._logprobs[:count], self._ends[:count]
        return piece
