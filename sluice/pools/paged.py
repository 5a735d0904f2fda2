"""Full pages: state kept for every position until the request ends (compressed entries, KV)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from sluice.errors import PoolError
from sluice.layout.component import Component, Space
from sluice.pools.allocator import PageAllocator
from sluice.pools.base import Occupancy, RequestTables
from sluice.pools.ledger import Ledger
from sluice.pools.storage import ComponentStorage, Fill, find


def pages_for(num_tokens: int, page_tokens: int) -> int:
    return -(-num_tokens // page_tokens)


class PagePool:
    """PAGE items. Requests without paged state get pages too: the window map needs the ids.

    Full pages can be shared: kept beyond a request's end, and read by those that begin like it.
    """

    whole_in_rows = True

    def __init__(
        self,
        storages: Sequence[ComponentStorage],
        num_pages: int,
        page_tokens: int,
        verify_tokens: int,
        fill: Fill,
    ) -> None:
        self._storages = tuple(storages)
        self._ledger = Ledger(PageAllocator(Space.PAGE, num_pages))
        self._page_tokens = page_tokens
        self._verify_tokens = verify_tokens
        self._fill = fill

    def components(self) -> tuple[Component, ...]:
        return tuple(storage.component for storage in self._storages)

    def buffer(self, component: str, layer_id: int) -> Tensor:
        return find(self._storages, component).buffer(layer_id)

    def promise_for(self, max_tokens: int) -> int:
        """Pages of ``max_tokens`` positions and the drafted ones behind them."""
        return pages_for(max_tokens + self._verify_tokens, self._page_tokens)

    def can_open(self, max_tokens: int, shared: Sequence[int]) -> bool:
        return self._ledger.can_open(self.promise_for(max_tokens), shared)

    def open(self, tables: RequestTables, max_tokens: int, shared: Sequence[int]) -> None:
        self._ledger.open(tables.slot, self.promise_for(max_tokens), shared)
        tables.pages.extend(shared)

    @property
    def page_bytes(self) -> int:
        """Bytes a page holds over all components."""
        return sum(c.bytes_per_row * c.rows_per_item // c.interleave for c in self.components())

    def share(self, tables: RequestTables, pages: Sequence[int]) -> None:
        """Keep pages of the request whose every position is committed. Raises ``PoolError``."""
        closed = tables.pages[: tables.kv_len // self._page_tokens]
        if early := set(pages) - set(closed):
            raise PoolError(
                f"request {tables.request_id}: page {min(early)} isn't full at "
                f"{tables.kv_len} committed tokens and can't be shared"
            )
        self._ledger.share(tables.slot, pages)

    def holders(self, page: int) -> int:
        """Requests that hold a kept page."""
        return self._ledger.holders(page)

    def evict(self, page: int) -> None:
        self._ledger.evict(page)

    def evict_with(self, evict_some: Callable[[int], None]) -> None:
        self._ledger.evict_with(evict_some)

    def can_grow(self, tables: RequestTables, max_tokens: int) -> bool:
        return self._ledger.can_raise(tables.slot, self.promise_for(max_tokens))

    def grow(self, tables: RequestTables, max_tokens: int) -> None:
        self._ledger.raise_to(tables.slot, self.promise_for(max_tokens))

    def extend(self, tables: RequestTables, num_tokens: int, live_from: int) -> None:
        missing = pages_for(num_tokens, self._page_tokens) - len(tables.pages)
        if missing <= 0:
            return
        last = tables.pages[-1] if tables.pages else 0
        pages = self._ledger.take(tables.slot, missing, after=last)
        tables.pages.extend(pages)
        if self._fill is not Fill.NONE:
            for storage in self._storages:
                storage.write(pages, self._fill)

    def advance(self, tables: RequestTables, committed_tokens: int) -> None:
        """Nothing: history is read until the request ends."""

    def close(self, tables: RequestTables) -> None:
        self._ledger.close(tables.slot)
        tables.pages.clear()

    def quarantine(self, tables: RequestTables) -> None:
        self._ledger.quarantine(tables.slot)

    def occupancy(self) -> tuple[Occupancy, ...]:
        return (self._ledger.allocator.occupancy(),)

    def promised(self) -> int:
        return self._ledger.allocator.promised

    def check(self, tables: Sequence[RequestTables]) -> None:
        """Books balance, and each open request's table lists exactly the pages it holds."""
        self._ledger.check()
        for one in tables:
            self._ledger.check_listed(one.slot, one.pages)
