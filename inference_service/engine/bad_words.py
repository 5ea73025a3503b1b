"""Words that an answer must not contain, as sequences of token ids: which ids would complete one."""

from __future__ import annotations

from collections import defaultdict


class BadWords:
    """Matches the words of one request. A word that begins in the prompt counts too.

    The sequence's last token may be known to the device alone, so a word of several tokens gives a pair: after the one id, not the other.
    """

    def __init__(self, words: list[list[int]]) -> None:
        self.ids = [word[0] for word in words if len(word) == 1]
        """Never to be drawn."""
        self._pairs = [(word[0], word[1]) for word in words if len(word) == 2]
        self._longer: dict[int, list[list[int]]] = defaultdict(list)
        for word in words:
            if len(word) > 2:
                self._longer[word[-3]].append(word)

    def pairs(self, tokens: list[int], end: int) -> list[tuple[int, int]]:
        """Pairs (last id, banned id), whatever the token is that follows `tokens[:end]` and is the sequence's last."""
        longer = self._longer.get(tokens[end - 1], ()) if end else ()
        return self._pairs + [(word[-2], word[-1]) for word in longer if _ends_with(tokens, end, word[:-2])]


def _ends_with(tokens: list[int], end: int, word: list[int]) -> bool:
    return end >= len(word) and tokens[end - len(word) : end] == word
