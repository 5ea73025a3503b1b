"""The one owner of KV pages: which are free, held by requests, or kept for their prefix.

A page is in exactly one of three states:
- free: in the free list, its content meaningless;
- held: one or more requests have it in their page table;
- idle: no request holds it, but the prefix tree does; it can be taken back at any time, least recently used first.

A request that holds a page of the tree also holds all pages above it. So an idle page has only idle pages below it, and since a request
lets go of its pages deepest first, the least recently used idle page is always a leaf.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from inference_service.engine.prefix_cache import Node, PageKey, PrefixTree


class KvPages:
    """Hands out pages by number; the executor's KV pool is indexed by the same numbers."""

    def __init__(self, pages: int, page_size: int, *, prefix: bool = True) -> None:
        self.total = pages
        self.page_size = page_size
        self.prefix = prefix
        self.tree = PrefixTree(page_size)
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._node_of: list[Node | None] = [None] * pages
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that `allocate` could hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Idle pages."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Pages that requests hold."""
        return self.total - self.available

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def match(self, token_ids: list[int], salt: str = "") -> list[Node]:
        """Cached pages of the beginning of `token_ids`. The last token is never matched: its logits are still to be computed."""
        return self.tree.match(token_ids, (len(token_ids) - 1) // self.page_size, salt) if self.prefix else []

    def count_available_after(self, nodes: list[Node]) -> int:
        """Pages left for `allocate` once `nodes` are held."""
        return self.available - sum(self._holders[node.page] == 0 for node in nodes)

    def hold(self, pages: Iterable[int]) -> None:
        """Add one holder to each page, which must be held or idle."""
        for page in pages:
            if self._holders[page] == 0:
                del self._idle[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with one holder each; idle pages are taken back when free ones run out.

        Raises MemoryError, and takes nothing, where there are not enough.
        """
        if count > self.available:
            raise MemoryError(f"{count} KV pages wanted, {self.available} available")
        return [self._take() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Drop one holder of each page of a page table. Pages that nobody holds become idle if the tree has them, else free."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._node_of[page] is not None:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def publish(self, parent: Node, key: PageKey, page: int) -> Node:
        """Enter a full page below `parent`, the caller's page before it, and give its node.

        Where another request has published the same tokens meanwhile, the caller is moved onto that page and its own is released: the
        caller must put the node's page in its page table.
        """
        node = parent.children.get(key)
        if node is None:
            node = self._node_of[page] = self.tree.add(parent, key, page)
        elif node.page != page:
            self.hold([node.page])
            self.release([page])
        return node

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            node = self._node_of[page]
            assert node is not None
            self.tree.remove(node)
            self._node_of[page] = None
        self._holders[page] = 1
        return page

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Assert that every page is in one state and held as often as all requests' page tables say. For tests and debugging."""
        held = Counter(page for table in tables for page in table)
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & idle and not (free | idle) & held.keys(), "a page is in two states"
        assert len(free) + len(idle) + len(held) == self.total, "a page is lost"
        assert all(self._holders[page] == held[page] for page in range(self.total)), "holders differ from the page tables"
        nodes = {node.page: node for node in self.tree}
        assert nodes == {page: node for page, node in enumerate(self._node_of) if node is not None}, "the tree and its pages differ"
        assert idle == {page for page in nodes if not held[page]}, "an unheld page of the tree is not idle"
        order = {page: place for place, page in enumerate(self._idle)}
        for node in nodes.values():
            if node.parent is not None and node.parent.page in order:
                assert order.get(node.page, self.total) < order[node.parent.page], "an idle page would be taken before one below it"
