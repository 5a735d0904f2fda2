"""Prompts that begin alike: pages of history are shared where they lie, everything else is copied.

History is never written again, so a page of it can be read by any number of requests. Windows, open
blocks and recurrent state exist once a request and move on: a prefix can be continued only where
somebody copied them, at depths of a grid. In paged mode the window of a depth lies on full pages too,
which therefore are not shared: the copy holds their history as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.config import EngineConfig
from sluice.engine.radix import RadixTree
from sluice.engine.window import window_floor
from sluice.layout.component import Component, Coverage, Owner, Space
from sluice.models.snapshots import SnapshotGrid
from sluice.pools.backup import EarlierState, StateBackup, back_up, restore
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory
from sluice.types import Role


@dataclass(frozen=True)
class PrefixHit:
    """How far a prompt is known: ``depth`` tokens, in ``pages`` to share and in ``state`` to copy."""

    depth: int = 0
    pages: tuple[int, ...] = ()
    state: StateBackup | None = None


MISS = PrefixHit()


class PrefixStore:
    """What one engine keeps of its requests' beginnings. Raises ``ConfigError`` for a wrong interval.

    Where history is all there is, a prefix can be continued behind any page, and no chunk is cut.
    """

    def __init__(self, memory: Memory, config: EngineConfig, verify_tokens: int) -> None:
        self._memory = memory
        self._components = memory.components()
        page_tokens = self._page_tokens = memory.page_tokens
        self._copies = any(_outlives_no_step(component) for component in self._components)
        self.grid = (
            SnapshotGrid(config.prefix_interval_tokens, page_tokens, verify_tokens)
            if self._copies
            else SnapshotGrid(page_tokens, page_tokens, 1)
        )
        self._tree = RadixTree(memory, page_tokens, memory.page_bytes, config.prefix_bytes)
        memory.evict_with(self._tree.evict_pages)

    @classmethod
    def of(
        cls, role: Role, memory: Memory, config: EngineConfig, verify_tokens: int
    ) -> PrefixStore | None:
        """None where it is off, and on a decode pod: no prompt is computed there."""
        if config.prefix_bytes == 0 or role is Role.DECODE:
            return None
        return cls(memory, config, verify_tokens)

    @property
    def num_bytes(self) -> int:
        """Of pages (cached or held by requests) and copies."""
        return self._tree.num_bytes

    def match(self, prompt: Sequence[int], limit: int) -> PrefixHit:
        """The deepest known prefix of ``prompt`` of at most ``limit`` tokens."""
        path = self._tree.find(prompt[: max(0, limit)])
        hit, pages = MISS, 0
        for index, node in enumerate(path):
            if index == pages and node.page is not None:
                pages += 1
            depth = (index + 1) * self._page_tokens
            shared = self._shared_pages(depth)
            if shared > pages:
                break
            if node.state is not None or not self._copies:
                taken = tuple(n.page for n in path[:shared] if n.page is not None)
                hit = PrefixHit(depth, taken, node.state)
        self._tree.touch(path[: hit.depth // self._page_tokens])
        return hit

    def restore(self, hit: PrefixHit, tables: RequestTables) -> None:
        """Complete a request that was opened with ``hit.pages`` and has items for ``hit.depth``
        positions; ``kv_len`` becomes that.
        """
        tables.kv_len = len(hit.pages) * self._page_tokens
        if hit.state is not None:
            restore(self._memory, hit.state, tables)

    def chunk_stop(self, start: int, stop: int) -> int:
        """Where a prefill chunk ``[start, stop)`` must end so that its end can be kept."""
        return self.grid.chunk_stop(start, stop) if self._copies else stop

    def keep_chunk(self, tokens: Sequence[int], tables: RequestTables) -> None:
        """A chunk has ended at ``tables.kv_len``: keep what that leaves, where it is on the grid."""
        depth = self.grid.deepest(tables.kv_len)
        if depth == tables.kv_len or not self._copies:
            self._keep(tokens, tables, depth, None)

    def keep_step(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        tables: RequestTables,
        start: int,
        earlier: EarlierState | None,
    ) -> None:
        """A verify step has moved a request from ``start`` to ``tables.kv_len`` tokens: keep the depth
        that it reached or passed, if there is one.

        ``earlier``: recurrent state at that depth; None where the model has none or moved it itself.
        """
        crossing = self.grid.crossing(start, tables.kv_len - start)
        # Tokens behind a stop token were verified, and are nobody's answer.
        if crossing is not None and crossing.depth <= len(prompt) + len(output):
            self._keep((*prompt, *output), tables, crossing.depth, earlier)

    def _keep(
        self, tokens: Sequence[int], tables: RequestTables, depth: int, earlier: EarlierState | None
    ) -> None:
        if depth == 0:
            return
        shared, state = self._shared_pages(depth), None
        if self._copies and not self._has_state(tokens[:depth]):
            have = shared * self._page_tokens
            state = back_up(self._memory, tables, have, depth, earlier)
        pages = self._tree.insert(tokens[:depth], tables.pages[:shared], state)
        if pages:
            self._memory.share(tables, pages)

    def _has_state(self, tokens: Sequence[int]) -> bool:
        path = self._tree.find(tokens)
        return len(path) * self._page_tokens == len(tokens) and path[-1].state is not None

    def _shared_pages(self, depth: int) -> int:
        """Full pages of a prefix whose window is not read behind it."""
        if not any(c.space is Space.WINDOW_PAGE for c in self._components):
            return depth // self._page_tokens
        return window_floor(self._components, depth) // self._page_tokens


def _outlives_no_step(component: Component) -> bool:
    """Whether later tokens overwrite the state. A draft's newest row is always made anew: at least
    one row of a prompt runs, and shows it.
    """
    newest_row = component.owner is Owner.DRAFT and component.coverage is Coverage.LAST
    return component.coverage is not Coverage.HISTORY and not newest_row
