"""Random lives over one tree of prefixes and the real books of pages: what is held stays, the longest
match is found, every byte is counted, and whoever was promised pages gets them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sluice.engine.radix import Node, RadixTree
from sluice.layout.component import Space
from sluice.pools.allocator import PageAllocator
from sluice.pools.backup import StateBackup
from sluice.pools.ledger import Ledger

PAGE, PAGES, PAGE_BYTES, STATE_BYTES, LONGEST = 2, 12, 10, 7, 5
# Few different tokens, so that prompts share beginnings.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=LONGEST).map(
    lambda bits: tuple(token for bit in bits for token in (bit, 9))
)


@dataclass
class _Life:
    """A request: its tokens, its pages in order, and how many of those are its own."""

    slot: int
    tokens: tuple[int, ...]
    pages: list[int]
    own: list[int] = field(default_factory=list)


class TreeMachine(RuleBasedStateMachine):
    max_bytes: int

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(PageAllocator(Space.PAGE, PAGES))
        self.tree = RadixTree(self.ledger, PAGE, PAGE_BYTES, self.max_bytes)
        self.ledger.evict_with(self.tree.evict_pages)
        self.lives: list[_Life] = []
        self.slots = itertools.count(1)

    @rule(tokens=PROMPTS)
    def arrive(self, tokens: tuple[int, ...]) -> None:
        """Begin with what is known; whoever fits without it must fit with it, and gets every page."""
        path = self.tree.find(tokens)
        known = list(itertools.takewhile(lambda node: node.page is not None, path))
        self.tree.touch(known)
        shared = [node.page for node in known if node.page is not None]
        fits_cold = self.ledger.can_open(LONGEST)
        assert not fits_cold or self.ledger.can_open(LONGEST, shared)
        if not self.ledger.can_open(LONGEST, shared):
            return
        life = _Life(next(self.slots), tokens, list(shared))
        self.ledger.open(life.slot, LONGEST, shared)
        life.own = self.ledger.take(life.slot, len(tokens) // PAGE - len(shared))
        life.pages += life.own
        self.lives.append(life)

    @precondition(lambda self: self.lives)
    @rule(pick=st.integers(0, 9), pages=st.integers(1, LONGEST), with_state=st.booleans())
    def keep(self, pick: int, pages: int, with_state: bool) -> None:
        life = self.lives[pick % len(self.lives)]
        pages = min(pages, len(life.pages))
        state = StateBackup(0, pages * PAGE, 0, (), STATE_BYTES) if with_state else None
        taken = self.tree.insert(life.tokens[: pages * PAGE], life.pages[:pages], state)
        if taken is not None:
            assert set(taken) <= set(life.own), "a page is at one place of the tree only"
            self.ledger.share(life.slot, taken)
            life.own = [page for page in life.own if page not in taken]
            path = self.tree.find(life.tokens[: pages * PAGE])
            assert len(path) == pages
            assert all(node.page is not None for node in path)
            assert state is None or path[-1].state is not None

    @precondition(lambda self: self.lives)
    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        life = self.lives.pop(pick % len(self.lives))
        self.ledger.close(life.slot)

    @rule(count=st.integers(1, PAGES))
    def press(self, count: int) -> None:
        """Somebody with no beginning in common takes pages."""
        slot = next(self.slots)
        if self.ledger.can_open(count):
            self.ledger.open(slot, count)
            assert len(self.ledger.take(slot, count)) == count
            self.ledger.close(slot)

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check()
        for life in self.lives:
            self.ledger.check_listed(life.slot, life.pages)

    @invariant()
    def every_byte_is_counted_and_within_the_limit(self) -> None:
        nodes = self._nodes()
        pages = [node.page for node in nodes if node.page is not None]
        states = sum(node.state is not None for node in nodes)
        assert len(set(pages)) == len(pages) == self.tree.num_pages
        assert self.tree.num_bytes == PAGE_BYTES * len(pages) + STATE_BYTES * states
        assert self.tree.num_bytes <= self.max_bytes
        assert set(nodes) == set(self.tree._order)

    @invariant()
    def every_kept_page_is_in_the_tree(self) -> None:
        pages = {node.page for node in self._nodes() if node.page is not None}
        assert pages == set(self.ledger._holders), "a cached page outside could never be evicted"

    @invariant()
    def no_leaf_is_empty_and_ancestors_are_younger(self) -> None:
        age = {node: place for place, node in enumerate(self.tree._order)}
        for node in self._nodes():
            assert node.children or node.page is not None or node.state is not None
            assert all(age[child] < age[node] for child in node.children.values())

    @invariant()
    def the_longest_match_is_found(self) -> None:
        known = {self._tokens(node): node for node in self._nodes()}
        for bits in itertools.product((0, 1), repeat=3):
            tokens = tuple(token for bit in bits for token in (bit, 9))
            depths = [d for d in range(PAGE, len(tokens) + 1, PAGE) if tokens[:d] in known]
            assert self.tree.find(tokens) == [known[tokens[:d]] for d in depths]
            assert self.tree.find((*tokens, 9)) == self.tree.find(tokens), "whole pages only"

    def teardown(self) -> None:
        for life in self.lives:
            self.ledger.close(life.slot)
        occupancy = self.ledger.allocator.occupancy()
        assert occupancy.free + occupancy.cached == PAGES
        assert self.ledger.allocator.promised == 0
        self.ledger.open(next(self.slots), PAGES)
        self.ledger.take(next(self.slots) - 1, PAGES)
        assert self.tree.num_pages == 0, "everything cached can be had"

    def _nodes(self) -> list[Node]:
        found, todo = [], [self.tree._root]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            found.append(node)
        return found[1:]

    def _tokens(self, node: Node) -> tuple[int, ...]:
        return () if node.parent is None else (*self._tokens(node.parent), *node.key)


class RoomyMachine(TreeMachine):
    max_bytes = 1 << 20


class TightMachine(TreeMachine):
    max_bytes = 5 * PAGE_BYTES + 2 * STATE_BYTES


@pytest.mark.parametrize("machine", [RoomyMachine, TightMachine])
def test_random_lives_over_one_tree(machine: type[TreeMachine]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )
