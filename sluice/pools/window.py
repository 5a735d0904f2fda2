"""Window pages: state of the last W tokens, found from full pages through one mapping."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sluice.errors import PoolError
from sluice.layout.component import Component, Space
from sluice.layout.span import live_ordinals
from sluice.pools.allocator import PageAllocator
from sluice.pools.base import Occupancy, RequestTables, WindowMap
from sluice.pools.ledger import Ledger
from sluice.pools.paged import pages_for
from sluice.pools.storage import ComponentStorage, Fill, find


def pages_touched(num_tokens: int, page_tokens: int) -> int:
    """The most pages that ``num_tokens`` consecutive positions can lie in."""
    return 0 if num_tokens == 0 else (num_tokens + page_tokens - 2) // page_tokens + 1


class WindowPool:
    """WINDOW_PAGE items (paged mode). Target window, compressor tails and draft window share them.

    A forward that ends at position n may be rolled back to no less than n - T + 1, so the positions
    whose window state can ever be read again start at ``needed_from(n - T + 1)``. Earlier positions
    of a long chunk get no window page: the map says 0, and what is written there lands in the
    padding page.
    """

    whole_in_rows = True

    def __init__(
        self,
        storages: Sequence[ComponentStorage],
        window_map: WindowMap,
        num_window_pages: int,
        page_tokens: int,
        verify_tokens: int,
        fill: Fill,
    ) -> None:
        self._storages = tuple(storages)
        self._map = window_map
        self._ledger = Ledger(PageAllocator(Space.WINDOW_PAGE, num_window_pages))
        self._page_tokens = page_tokens
        self._verify_tokens = verify_tokens
        self._fill = fill
        self._dead_pages: dict[int, int] = {}  # slot -> leading pages whose window state is gone

    def components(self) -> tuple[Component, ...]:
        return tuple(storage.component for storage in self._storages)

    def buffer(self, component: str, layer_id: int) -> Tensor:
        return find(self._storages, component).buffer(layer_id)

    def needed_from(self, length: int) -> int:
        """First position whose window state is still read after ``length`` committed tokens.

        Usually ``length - W``; the overlap tail's previous block can reach further back when W is
        small.
        """
        return min(live_ordinals(component, length).start for component in self.components())

    def promise_for(self, max_tokens: int) -> int:
        """The most window pages a request holds at once.

        Those the next forward reads and those it leaves behind; a chunk longer than W keeps them
        apart.
        """
        retained = max(self._retained_tokens(component) for component in self.components())
        read = pages_touched(retained, self._page_tokens)
        left = pages_touched(retained + self._verify_tokens - 1, self._page_tokens)
        return min(read + left, pages_for(max_tokens + self._verify_tokens, self._page_tokens))

    def can_open(self, max_tokens: int, shared: Sequence[int]) -> bool:
        return self._ledger.allocator.can_promise(self.promise_for(max_tokens))

    def open(self, tables: RequestTables, max_tokens: int, shared: Sequence[int]) -> None:
        """Shared pages are never mapped for this request: the map is by full page, and whoever wrote
        them may still have its own window there.
        """
        self._ledger.open(tables.slot, self.promise_for(max_tokens))
        self._dead_pages[tables.slot] = len(shared)

    def can_grow(self, tables: RequestTables, max_tokens: int) -> bool:
        return self._ledger.can_raise(tables.slot, self.promise_for(max_tokens))

    def grow(self, tables: RequestTables, max_tokens: int) -> None:
        self._ledger.raise_to(tables.slot, self.promise_for(max_tokens))

    def extend(self, tables: RequestTables, num_tokens: int, live_from: int) -> None:
        """Map window pages for what stays readable after a forward that ends at ``num_tokens``.

        Full pages for these positions must be there already. The dead range keeps mapping 0.
        """
        lowest_commit = max(0, num_tokens - self._verify_tokens + 1)
        # A caller knows the window; the overlap tail's previous block may begin a little before it.
        start = max(min(live_from, self.needed_from(num_tokens)), self.needed_from(lowest_commit))
        first = max(start // self._page_tokens, self._dead_pages[tables.slot])
        pages = tables.pages[first : pages_for(num_tokens, self._page_tokens)]
        unmapped = [page for page in pages if self._map[page] == 0]
        if not unmapped:
            return
        at = tables.pages.index(unmapped[0])
        last = self._map[tables.pages[at - 1]] if at else 0
        window_pages = self._ledger.take(tables.slot, len(unmapped), after=last)
        for page, window_page in zip(unmapped, window_pages, strict=True):
            self._map.set(page, window_page)
        if self._fill is not Fill.NONE:
            for storage in self._storages:
                storage.write(window_pages, self._fill)

    def advance(self, tables: RequestTables, committed_tokens: int) -> None:
        """Free window pages that lie wholly before what is still read.

        Raises ``PoolError`` when a row that is still read isn't mapped: then somebody extended over
        several chunks at once, and the forwards in between read padding.
        """
        first = self.needed_from(committed_tokens) // self._page_tokens
        stop = pages_for(committed_tokens, self._page_tokens)
        holes = [i for i in range(first, stop) if not self._mapped(tables, i)]
        if holes:
            raise PoolError(
                f"request {tables.request_id}: {committed_tokens} tokens are committed, but page "
                f"{holes[0]} of their window (pages {first}..{stop - 1}) was never mapped",
                remedy="extend to the end of each chunk, then run it, then advance",
            )
        dead = tables.pages[self._dead_pages[tables.slot] : first]
        window_pages = [self._map[page] for page in dead if self._map[page]]
        self._ledger.free(tables.slot, window_pages)
        for page in dead:
            self._map.set(page, 0)
        self._dead_pages[tables.slot] = max(first, self._dead_pages[tables.slot])

    def close(self, tables: RequestTables) -> None:
        """Call before the full pages are given back: their mapping must be 0 for the next owner."""
        self._ledger.close(tables.slot)
        for page in self._own_pages(tables):
            self._map.set(page, 0)
        del self._dead_pages[tables.slot]

    def quarantine(self, tables: RequestTables) -> None:
        self._ledger.quarantine(tables.slot)

    def occupancy(self) -> tuple[Occupancy, ...]:
        return (self._ledger.allocator.occupancy(),)

    def promised(self) -> int:
        return self._ledger.allocator.promised

    def check(self, tables: Sequence[RequestTables]) -> None:
        """Books balance, and the map leads each open request to the window pages it holds."""
        self._ledger.check()
        for one in tables:
            mapped = [self._map[page] for page in self._own_pages(one) if self._map[page]]
            self._ledger.check_listed(one.slot, mapped)

    def _own_pages(self, tables: RequestTables) -> list[int]:
        """Full pages that may be mapped for this request: all but shared ones, and dead ones, whose
        mapping is gone.
        """
        return tables.pages[self._dead_pages[tables.slot] :]

    def _mapped(self, tables: RequestTables, index: int) -> bool:
        return index < len(tables.pages) and self._map[tables.pages[index]] != 0

    def _retained_tokens(self, component: Component) -> int:
        # needed_from moves in steps of at most window_tokens, so two windows bound an overlap tail.
        lengths = range(2 * component.window_tokens, 3 * component.window_tokens + 1)
        return max(len(live_ordinals(component, length)) for length in lengths)
