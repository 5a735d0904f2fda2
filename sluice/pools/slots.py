"""Request slots: state of a request as a whole (rings, open blocks, the draft's hidden row)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sluice.errors import PoolError
from sluice.layout.component import Component, Space
from sluice.pools.allocator import ItemState, PageAllocator
from sluice.pools.base import Occupancy, RequestTables
from sluice.pools.storage import ComponentStorage, Fill, find


class SlotPool:
    """RING_ROW, STATE_ROW, REQUEST_SLOT: one number a request for all; slot 0 is padding."""

    whole_in_rows = True

    def __init__(self, storages: Sequence[ComponentStorage], num_slots: int, fill: Fill) -> None:
        self._storages = tuple(storages)
        self._allocator = PageAllocator(Space.REQUEST_SLOT, num_slots)
        self._fill = fill

    def components(self) -> tuple[Component, ...]:
        return tuple(storage.component for storage in self._storages)

    def buffer(self, component: str, layer_id: int) -> Tensor:
        return find(self._storages, component).buffer(layer_id)

    def promise_for(self, max_tokens: int) -> int:
        return 1

    def can_open(self, max_tokens: int, shared: Sequence[int]) -> bool:
        return self._allocator.can_promise(1)

    def take(self) -> int:
        """A slot whose state is cleared (debug: filled) before anybody learns its address."""
        self._allocator.promise(1)
        (slot,) = self._allocator.take(1)
        for storage in self._storages:
            storage.write([slot], self._fill)
        return slot

    def open(self, tables: RequestTables, max_tokens: int, shared: Sequence[int]) -> None:
        """Nothing: the slot was taken by ``take``, because every other account is named by it."""

    def can_grow(self, tables: RequestTables, max_tokens: int) -> bool:
        return True

    def grow(self, tables: RequestTables, max_tokens: int) -> None:
        """Nothing: a slot holds a request of any length."""

    def extend(self, tables: RequestTables, num_tokens: int, live_from: int) -> None:
        """Nothing: a slot holds a request of any length."""

    def advance(self, tables: RequestTables, committed_tokens: int) -> None:
        """Nothing: rings overwrite what left the window."""

    def close(self, tables: RequestTables) -> None:
        if self._allocator.state(tables.slot) is ItemState.QUARANTINED:
            self._allocator.release([tables.slot])
        else:
            self._allocator.free([tables.slot])
        self._allocator.withdraw(1)
        tables.slot = 0

    def quarantine(self, tables: RequestTables) -> None:
        self._allocator.quarantine([tables.slot])

    def occupancy(self) -> tuple[Occupancy, ...]:
        return (self._allocator.occupancy(),)

    def promised(self) -> int:
        return self._allocator.promised

    def check(self, tables: Sequence[RequestTables]) -> None:
        self._allocator.check()
        slots = sorted(one.slot for one in tables)
        in_use = [
            slot
            for slot in range(1, self._allocator.total + 1)
            if self._allocator.state(slot) is not ItemState.FREE
        ]
        if slots != in_use:
            raise PoolError(f"open requests have slots {slots}, slots in use are {in_use}")
