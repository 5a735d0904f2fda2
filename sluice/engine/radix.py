"""A tree of token pages: which beginnings are kept, in which pages, and what was used last.

An edge is one page of tokens, so a path is a prefix of whole pages. The tree is books only: pages lie
in the pools and are held by requests, copies of state lie on the host.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sluice.pools.backup import StateBackup

Key = tuple[int, ...]


class KeptPages(Protocol):
    """Pages that outlive their request (``pools.memory.Memory``)."""

    def holders(self, page: int) -> int:
        """Open requests that hold the page."""
        ...

    def evict(self, page: int) -> None:
        """Give back a page that nobody holds."""
        ...


@dataclass(eq=False)  # nodes are told apart by where they are
class Node:
    """The prefix that ends with one page of tokens."""

    parent: Node | None
    key: Key
    children: dict[Key, Node] = field(default_factory=dict)
    page: int | None = None  # holds the history of this page of tokens; None = nobody kept it
    state: StateBackup | None = None  # what a request needs beside pages to go on behind this one


class RadixTree:
    """At most ``max_bytes`` of pages and states; the least recently used leaf goes first.

    What a request holds is never evicted. Whoever uses a node uses its ancestors, so these are younger
    in the order than their children, and a prefix loses its end first.
    """

    def __init__(self, pages: KeptPages, page_tokens: int, page_bytes: int, max_bytes: int) -> None:
        self._pages = pages
        self._page_tokens = page_tokens
        self._page_bytes = page_bytes
        self._max_bytes = max_bytes
        self._root = Node(None, ())
        self._order: OrderedDict[Node, None] = OrderedDict()  # least recently used first
        self.num_bytes = 0
        self.num_pages = 0

    def find(self, tokens: Sequence[int]) -> list[Node]:
        """The longest known path of whole pages that ``tokens`` begin with."""
        path: list[Node] = []
        node = self._root
        for key in self._keys(tokens):
            if key not in node.children:
                break
            node = node.children[key]
            path.append(node)
        return path

    def touch(self, path: Sequence[Node]) -> None:
        """A path from the root was used."""
        for node in reversed(path):
            self._order.move_to_end(node)

    def insert(
        self, tokens: Sequence[int], pages: Sequence[int], state: StateBackup | None
    ) -> list[int] | None:
        """Keep ``pages`` for the first whole pages of ``tokens``, and ``state`` at their end.

        What is there already stays. Returns the pages that the tree took, which must be shared before
        anything else happens; None when they don't fit beside what is held: then nothing was kept.
        """
        keys = self._keys(tokens)
        path = self.find(tokens)
        self.touch(path)
        lacking = [i for i in range(len(pages)) if i >= len(path) or path[i].page is None]
        wants_state = len(path) < len(keys) or path[-1].state is None
        need = self._page_bytes * len(lacking)
        if state is not None and wants_state:
            need += state.num_bytes
        if not self._make_room(need, path):
            return None
        while len(path) < len(keys):
            parent, key = path[-1] if path else self._root, keys[len(path)]
            path.append(Node(parent, key))
            parent.children[key] = path[-1]
            self._order[path[-1]] = None
        self.touch(path)
        for index in lacking:
            path[index].page = pages[index]
        if state is not None and wants_state:
            path[-1].state = state
        self.num_pages += len(lacking)
        self.num_bytes += need
        return [pages[index] for index in lacking]

    def evict_pages(self, count: int) -> None:
        """Evict until ``count`` pages are given back, or nothing is left that nobody holds."""
        goal = self.num_pages - count
        while self.num_pages > goal and self._evict_one(()):
            pass

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        step = self._page_tokens
        return [tuple(tokens[i : i + step]) for i in range(0, len(tokens) - step + 1, step)]

    def _make_room(self, num_bytes: int, path: Collection[Node]) -> bool:
        """Evict others than ``path`` until ``num_bytes`` fit. What can't fit at all evicts nothing."""
        if num_bytes > self._max_bytes:
            return False
        while self.num_bytes + num_bytes > self._max_bytes:
            if not self._evict_one(path):
                return False
        return True

    def _evict_one(self, spared: Collection[Node]) -> bool:
        """The least recently used node that nobody holds, or of an inner one what it keeps: an inner
        node is the oldest only where requests hold every leaf below it.
        """
        for node in self._order:
            held = node.page is not None and self._pages.holders(node.page)
            if held or node in spared:
                continue
            if node.children and node.page is None and node.state is None:
                continue
            self._empty(node)
            if not node.children:
                self._remove(node)
            return True
        return False

    def _empty(self, node: Node) -> None:
        if node.page is not None:
            self._pages.evict(node.page)
            node.page = None
            self.num_pages -= 1
            self.num_bytes -= self._page_bytes
        if node.state is not None:
            self.num_bytes -= node.state.num_bytes
            node.state = None

    def _remove(self, node: Node) -> None:
        """An empty leaf, and every ancestor that was only on its way."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.children or at.page is not None or at.state is not None:
                return
            del at.parent.children[at.key], self._order[at]
            at = at.parent
