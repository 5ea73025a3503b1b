"""Matches stop strings over text that comes in pieces.

The rule, whatever the pieces: of all occurrences of all stop strings, the one that ends first wins, and of those that end together the
longest. The answer is the text before it. Text that may turn out to begin a stop string is held until that is decided.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings: each character is looked at once, however many strings there are.

    A state is a prefix of a stop string, the longest that the text ends with; it says how much text must be held.
    """

    __slots__ = ("_depth", "_fallback", "_held", "_longest", "_next", "_starts", "_state")

    def __init__(self, stop: Sequence[str]) -> None:
        """`stop` are the strings, none of them empty."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [""]  # the longest stop string that a state's text ends with
        self._fallback = [0]  # the longest other state that a state's text ends with
        self._starts = frozenset(string[0] for string in stop)
        self._state = 0
        self._held = ""
        for string in stop:
            self._add(string)
        self._link()

    def push(self, text: str, may_match: bool = True) -> tuple[str, str | None]:
        """The text that is now certain to be part of the answer, and the stop string that ended it, if one did.

        With `may_match` false a stop string that ends within `text` is no match, but one that begins there may be later.
        After a match nothing may be pushed.
        """
        if not self._state and self._starts.isdisjoint(text):
            return text, None
        text, seen = self._held + text, len(self._held)
        for end in range(seen, len(text)):
            self._step(text[end])
            if self._longest[self._state] and may_match:
                stop = self._longest[self._state]
                self._held = ""
                return text[: end + 1 - len(stop)], stop
        while self._state and not self._next[self._state]:  # an ignored match that nothing can continue
            self._state = self._fallback[self._state]
        certain = len(text) - self._depth[self._state]
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """At the end: the held text, which turned out to begin no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, character: str) -> None:
        state = self._state
        while state and character not in self._next[state]:
            state = self._fallback[state]
        self._state = self._next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest.append("")
                self._fallback.append(0)
            state = self._next[state][character]
        self._longest[state] = string

    def _link(self) -> None:
        """Set the fallbacks, nearest states first: each one's is found from its parent's."""
        queue = deque(self._next[0].values())
        while queue:
            parent = queue.popleft()
            for character, child in self._next[parent].items():
                state = self._fallback[parent]
                while state and character not in self._next[state]:
                    state = self._fallback[state]
                self._fallback[child] = self._next[state].get(character, 0)
                self._longest[child] = self._longest[child] or self._longest[self._fallback[child]]
                queue.append(child)
