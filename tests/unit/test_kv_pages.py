"""KvPages and its prefix tree, under arbitrary interleavings of what requests do to them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from inference_service.engine.kv_pages import KvPages

PAGES, PAGE_SIZE = 12, 2


class Table:
    """A request's page table with the tokens behind it, as the scheduler keeps it."""

    def __init__(self, pages: KvPages, tokens: list[int]) -> None:
        nodes = pages.match(tokens)
        self.tokens = tokens
        self.pages = [node.page for node in nodes]
        self.node = nodes[-1] if nodes else pages.tree.root
        self.published = len(nodes)
        pages.hold(self.pages)


class PagesMachine(RuleBasedStateMachine):
    """Requests begin, grow, publish and end; `content` remembers what each page was filled with."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pages = KvPages(PAGES, PAGE_SIZE)
        self.live: list[Table] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(target=tables, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def begin(self, tokens: list[int]) -> Table:
        table = Table(self.pages, tokens)
        for place, page in enumerate(table.pages):
            assert self.content[page] == tuple(tokens[: (place + 1) * PAGE_SIZE]), "a matched page holds other tokens"
        assert len(table.pages) * PAGE_SIZE < len(tokens), "the last token must be left to compute"
        self.live.append(table)
        return table

    @rule(table=tables)
    def fill(self, table: Table) -> None:
        missing = self.pages.pages_for(len(table.tokens)) - len(table.pages)
        if missing > self.pages.available:
            before = self.pages.available
            with pytest.raises(MemoryError):
                self.pages.allocate(missing)
            assert self.pages.available == before
            return
        for page in self.pages.allocate(missing):
            table.pages.append(page)
            self.content[page] = tuple(table.tokens[: len(table.pages) * PAGE_SIZE])

    @rule(table=tables)
    def publish(self, table: Table) -> None:
        for place in range(table.published, min(len(table.pages), len(table.tokens) // PAGE_SIZE)):
            key = tuple(table.tokens[place * PAGE_SIZE : (place + 1) * PAGE_SIZE])
            table.node = self.pages.publish(table.node, key, table.pages[place])
            table.pages[place] = table.node.page
            table.published += 1
            assert self.content[table.node.page] == tuple(table.tokens[: (place + 1) * PAGE_SIZE])

    @rule(table=consumes(tables))
    def end(self, table: Table) -> None:
        self.live.remove(table)
        self.pages.release(table.pages)

    @invariant()
    def holds(self) -> None:
        self.pages.check_invariants(table.pages for table in self.live)


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_least_recently_used_prefix_is_taken_first() -> None:
    pages = KvPages(4, 1)
    for tokens in ([1, 2, 9], [5, 6, 9]):
        table = Table(pages, tokens)
        table.pages += pages.allocate(2)
        for place in range(2):
            table.node = pages.publish(table.node, (tokens[place],), table.pages[place])
        pages.release(table.pages)
    assert pages.cached == 4
    assert len(Table(pages, [1, 2, 9]).pages) == 2, "the older prefix is used again"
    pages.allocate(1)
    assert len(pages.match([5, 6, 9])) == 1, "the end of the other one went"


def test_no_prefix_cache() -> None:
    pages = KvPages(4, 1, prefix=False)
    assert pages.match([1, 2, 3]) == []
