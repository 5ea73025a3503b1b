"""The pages of prompts whose further choices still wait for their turn.

The choices of a request beyond its first are forks: the prompt is computed once, by the first. A fork takes over its pages, all but the one
with the prompt's last token: that one will be written by each choice, so the fork gets a copy. What is left to compute is the last token,
whose logits give the fork its own first draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inference_service.engine.kv_pages import KvPages


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A computed prompt, held until the last of its forks has taken it over."""

    pages: list[int]
    """All its pages, the last one included; empty once they were needed elsewhere: the forks then compute the prompt themselves."""
    forks: int
    """How many wait."""


class SharedPrompts:
    """Holds prompts for forks, beside the requests that hold pages themselves. Whoever runs out of pages may take these back."""

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages
        self._held: list[SharedPrompt] = []

    def __iter__(self) -> Iterator[SharedPrompt]:
        """Those held."""
        return iter(self._held)

    def hold(self, pages: list[int], forks: int) -> SharedPrompt:
        """Hold a prompt's pages for so many forks."""
        shared = SharedPrompt(pages, forks)
        self._pages.hold(pages)
        self._held.append(shared)
        return shared

    def leave(self, shared: SharedPrompt) -> None:
        """One fork waits no longer: it has what it needs, or has ended. With the last one the pages are released."""
        shared.forks -= 1
        if not shared.forks and shared.pages:
            self._held.remove(shared)
            self._pages.release(shared.pages)

    def reclaim(self) -> bool:
        """Release the prompt that was held last, and say whether there was one."""
        if not self._held:
            return False
        shared = self._held.pop()
        self._pages.release(shared.pages)
        shared.pages = []
        return True
