"""The prefix cache's index: a radix tree whose digit is one full KV page of token ids.

A node stands for one page; the path from the root to it spells the tokens that its keys and values depend on. Requests with a salt have it
in their first digit, so that they find only what others of that salt have left. The tree knows neither reference counts nor free pages:
those are KvPages' (kv_pages.py), the one owner of pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

PageKey = tuple[int | str, ...]
"""A page's token ids; of a first page, the salt before them where there is one."""


@dataclass(slots=True, eq=False)
class Node:
    """One cached page. The root has page -1 and no parent."""

    key: PageKey
    page: int
    parent: Node | None
    children: dict[PageKey, Node] = field(default_factory=dict)


class PrefixTree:
    """Finds the pages that hold the beginning of a token sequence."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), -1, None)

    def key(self, token_ids: list[int], place: int, salt: str) -> PageKey:
        """The digit of a sequence's page, counted from 0."""
        ids = token_ids[place * self.page_size : (place + 1) * self.page_size]
        return (salt, *ids) if salt and not place else tuple(ids)

    def match(self, token_ids: list[int], max_pages: int, salt: str = "") -> list[Node]:
        """The nodes of the longest cached beginning of `token_ids`, from the root down, at most `max_pages`."""
        node = self.root
        path: list[Node] = []
        for place in range(max_pages):
            child = node.children.get(self.key(token_ids, place, salt))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def add(self, parent: Node, key: PageKey, page: int) -> Node:
        """Append a page below `parent`, which must not have `key` yet."""
        node = Node(key, page, parent)
        parent.children[key] = node
        return node

    def remove(self, leaf: Node) -> None:
        """Forget a page that nothing continues."""
        assert leaf.parent is not None and not leaf.children
        del leaf.parent.children[leaf.key]

    def __iter__(self) -> Iterator[Node]:
        """Every node but the root, parents before children."""
        pending = [self.root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if node is not self.root:
                yield node
