"""Who may use which item: item states, and capacity that is promised before it is taken."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.pools.base import Occupancy
from sluice.pools.free_runs import FreeRuns


class ItemState(Enum):
    """Where an item is in its life."""

    FREE = "free"
    HELD = "held"
    QUARANTINED = "quarantined"  # nobody here uses it, but a peer may still write it
    # Nobody uses it; what it holds may serve a later request, until it is evicted.
    CACHED = "cached"


class ItemEvent(Enum):
    """What can happen to an item."""

    TAKE = "taken"
    FREE = "freed"
    QUARANTINE = "quarantined"
    RELEASE = "released from quarantine"
    CACHE = "cached"
    REUSE = "reused"
    EVICT = "evicted"


TRANSITIONS: dict[tuple[ItemState, ItemEvent], ItemState] = {
    (ItemState.FREE, ItemEvent.TAKE): ItemState.HELD,
    (ItemState.HELD, ItemEvent.FREE): ItemState.FREE,
    (ItemState.HELD, ItemEvent.QUARANTINE): ItemState.QUARANTINED,
    (ItemState.QUARANTINED, ItemEvent.RELEASE): ItemState.FREE,
    (ItemState.HELD, ItemEvent.CACHE): ItemState.CACHED,
    (ItemState.CACHED, ItemEvent.REUSE): ItemState.HELD,
    (ItemState.CACHED, ItemEvent.EVICT): ItemState.FREE,
}


class PageAllocator:
    """Items ``1 .. total`` of one space; item 0 is padding and never handed out.

    A *promise* is capacity set aside for somebody who will take it later. Admission promises a
    request's worst case, so a running request never waits for an item, and two half-grown ones
    can't deadlock. Cached items are promised to nobody: they count as free to whoever wants a
    promise, and must be evicted before they are taken.
    """

    def __init__(self, space: Space, total: int) -> None:
        self.space = space
        self.total = total
        self._states = [ItemState.FREE] * (total + 1)
        self._free = FreeRuns(1, total + 1)
        self._count = {state: 0 for state in ItemState} | {ItemState.FREE: total}
        self._promised = 0

    @property
    def promised(self) -> int:
        """Items promised to somebody, taken or not."""
        return self._promised

    def can_promise(self, count: int) -> bool:
        return self._promised + count <= self.total

    def promise(self, count: int) -> None:
        """Set ``count`` items aside. Raises ``PoolError`` where ``can_promise`` says no."""
        if count < 0 or not self.can_promise(count):
            raise PoolError(
                f"{self.space.value}: can't promise {count} items, "
                f"{self._promised} of {self.total} are promised already"
            )
        self._promised += count

    def withdraw(self, count: int) -> None:
        """Take back a promise of ``count`` items that nobody holds."""
        if count < 0 or self._promised - count < self._used():
            raise PoolError(
                f"{self.space.value}: can't withdraw a promise of {count} items, "
                f"{self._promised} are promised and {self._used()} of those are in use"
            )
        self._promised -= count

    def take(self, count: int, after: int = 0) -> list[int]:
        """Hand out ``count`` items: those behind ``after`` where free, else the lowest fitting run.

        Raises ``PoolError`` beyond what is promised, and where cached items must be evicted first.
        """
        if self._used() + count > self._promised:
            raise PoolError(
                f"{self.space.value}: {count} items asked for, but {self._used()} of "
                f"{self._promised} promised are in use",
                remedy="promise capacity before taking it",
            )
        if count > self.num_free:
            raise PoolError(
                f"{self.space.value}: {count} items asked for, {self.num_free} are free and "
                f"{self._count[ItemState.CACHED]} cached",
                remedy="evict cached items first",
            )
        items = self._free.take(count, after)
        self._move(items, ItemEvent.TAKE)
        return items

    def free(self, items: Sequence[int]) -> None:
        """Give held items back. Raises ``PoolError`` naming one that isn't held; then none moves."""
        self._move(items, ItemEvent.FREE)
        self._free.give(items)

    def quarantine(self, items: Sequence[int]) -> None:
        """Set held items apart. They stay unusable, and stay promised, until ``release``."""
        self._move(items, ItemEvent.QUARANTINE)

    def release(self, items: Sequence[int]) -> None:
        """Free quarantined items, once no peer can write them any more."""
        self._move(items, ItemEvent.RELEASE)
        self._free.give(items)

    def cache(self, items: Sequence[int]) -> None:
        """Held items that nobody uses any more, but that may serve a later request."""
        self._move(items, ItemEvent.CACHE)

    def reuse(self, items: Sequence[int]) -> None:
        """Cached items are held again. Needs a promise, like ``take``."""
        if self._used() + len(items) > self._promised:
            raise PoolError(
                f"{self.space.value}: {len(items)} cached items to reuse, but {self._used()} of "
                f"{self._promised} promised are in use",
                remedy="promise capacity before reusing it",
            )
        self._move(items, ItemEvent.REUSE)

    def evict(self, items: Sequence[int]) -> None:
        """Free cached items: what they hold is forgotten."""
        self._move(items, ItemEvent.EVICT)
        self._free.give(items)

    @property
    def num_free(self) -> int:
        return self._count[ItemState.FREE]

    def state(self, item: int) -> ItemState:
        """Raises ``PoolError`` for padding and for numbers that don't exist."""
        if not 1 <= item <= self.total:
            what = "padding" if item == 0 else "not an item"
            raise PoolError(f"{self.space.value} item {item} is {what}; items are 1..{self.total}")
        return self._states[item]

    def occupancy(self) -> Occupancy:
        return Occupancy(
            space=self.space,
            total=self.total,
            free=self._count[ItemState.FREE],
            held=self._count[ItemState.HELD],
            quarantined=self._count[ItemState.QUARANTINED],
            cached=self._count[ItemState.CACHED],
        )

    def check(self) -> None:
        """Recount everything. Raises ``PoolError`` when the books don't balance."""
        counted = {state: self._states[1:].count(state) for state in ItemState}
        if counted != self._count or sum(counted.values()) != self.total:
            raise PoolError(f"{self.space.value}: counted {counted}, booked {self._count}")
        listed = list(self._free)
        actual = [i for i in range(1, self.total + 1) if self._states[i] is ItemState.FREE]
        if listed != actual:
            raise PoolError(f"{self.space.value}: free list {listed}, free items {actual}")
        if not self._used() <= self._promised <= self.total:
            raise PoolError(
                f"{self.space.value}: {self._used()} in use, {self._promised} promised, "
                f"{self.total} in total"
            )

    def _used(self) -> int:
        """Items that count against promises."""
        return self._count[ItemState.HELD] + self._count[ItemState.QUARANTINED]

    def _move(self, items: Sequence[int], event: ItemEvent) -> None:
        """All items or none: a list with one wrong item changes nothing."""
        if len(set(items)) != len(items):
            twice = next(item for item in items if items.count(item) > 1)
            raise PoolError(f"{self.space.value} item {twice} is named twice in one call")
        for item in items:
            before = self.state(item)
            if (before, event) not in TRANSITIONS:
                raise PoolError(
                    f"{self.space.value} item {item} is {before.value} and can't be {event.value}"
                )
        for item in items:
            before = self._states[item]
            after = TRANSITIONS[before, event]
            self._states[item] = after
            self._count[before] -= 1
            self._count[after] += 1
