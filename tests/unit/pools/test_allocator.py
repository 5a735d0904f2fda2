"""Item states move only along the table, and nothing is taken that wasn't promised."""

from __future__ import annotations

import itertools

import pytest

from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.pools.allocator import TRANSITIONS, ItemEvent, ItemState, PageAllocator
from sluice.pools.base import Occupancy


def allocator(total: int = 8, promised: int | None = None) -> PageAllocator:
    made = PageAllocator(Space.PAGE, total)
    made.promise(total if promised is None else promised)
    return made


def in_state(state: ItemState) -> tuple[PageAllocator, int]:
    pages = allocator()
    (item,) = pages.take(1)
    if state is ItemState.QUARANTINED:
        pages.quarantine([item])
    if state is ItemState.FREE:
        pages.free([item])
    if state is ItemState.CACHED:
        pages.cache([item])
    return pages, item


def test_item_zero_is_never_handed_out() -> None:
    assert allocator(4).take(4) == [1, 2, 3, 4]


def test_padding_and_unknown_items_are_refused_by_name() -> None:
    pages = allocator(4)
    with pytest.raises(PoolError, match=r"PAGE item 0 is padding"):
        pages.free([0])
    with pytest.raises(PoolError, match=r"PAGE item 5 is not an item; items are 1..4"):
        pages.free([5])


_CALLS = {
    ItemEvent.FREE: PageAllocator.free,
    ItemEvent.QUARANTINE: PageAllocator.quarantine,
    ItemEvent.RELEASE: PageAllocator.release,
    ItemEvent.CACHE: PageAllocator.cache,
    ItemEvent.REUSE: PageAllocator.reuse,
    ItemEvent.EVICT: PageAllocator.evict,
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ItemState, _CALLS)))
def test_every_move_follows_the_table(state: ItemState, event: ItemEvent) -> None:
    pages, item = in_state(state)
    allowed = {
        (ItemState.HELD, ItemEvent.FREE): ItemState.FREE,
        (ItemState.HELD, ItemEvent.QUARANTINE): ItemState.QUARANTINED,
        (ItemState.QUARANTINED, ItemEvent.RELEASE): ItemState.FREE,
        (ItemState.HELD, ItemEvent.CACHE): ItemState.CACHED,
        (ItemState.CACHED, ItemEvent.REUSE): ItemState.HELD,
        (ItemState.CACHED, ItemEvent.EVICT): ItemState.FREE,
    }
    if (state, event) in allowed:
        _CALLS[event](pages, [item])
        assert pages.state(item) is allowed[state, event]
    else:
        with pytest.raises(PoolError, match=rf"PAGE item {item} is {state.value} and can't be"):
            _CALLS[event](pages, [item])
        assert pages.state(item) is state
    pages.check()


def test_a_taken_item_is_not_taken_again() -> None:
    assert TRANSITIONS[ItemState.FREE, ItemEvent.TAKE] is ItemState.HELD
    assert (ItemState.HELD, ItemEvent.TAKE) not in TRANSITIONS
    assert (ItemState.QUARANTINED, ItemEvent.TAKE) not in TRANSITIONS
    assert (ItemState.CACHED, ItemEvent.TAKE) not in TRANSITIONS


def test_a_list_with_one_bad_item_changes_nothing() -> None:
    pages = allocator()
    held = pages.take(2)
    with pytest.raises(PoolError, match="item 7 is free"):
        pages.free([*held, 7])
    with pytest.raises(PoolError, match="item 1 is named twice"):
        pages.free([1, 2, 1])
    assert [pages.state(item) for item in held] == [ItemState.HELD] * 2
    pages.check()


def test_quarantined_items_are_not_handed_out() -> None:
    pages = allocator(3)
    pages.quarantine(pages.take(2))
    assert pages.take(1) == [3]
    with pytest.raises(PoolError, match="1 items asked for, but 3 of 3 promised are in use"):
        pages.take(1)


def test_occupancy_adds_up_to_the_total() -> None:
    pages = allocator(8)
    pages.quarantine(pages.take(2))
    pages.cache(pages.take(1))
    pages.take(3)
    assert pages.occupancy() == Occupancy(
        Space.PAGE, total=8, free=2, held=3, quarantined=2, cached=1
    )


def test_cached_items_are_promised_to_nobody_but_not_taken_before_they_are_evicted() -> None:
    pages = allocator(4, promised=2)
    pages.cache(pages.take(2))
    pages.withdraw(2)
    assert pages.can_promise(4)
    with pytest.raises(PoolError, match="1 cached items to reuse, but 0 of 0 promised"):
        pages.reuse([1])
    pages.promise(4)
    pages.take(2)
    with pytest.raises(PoolError, match="1 items asked for, 0 are free and 2 cached"):
        pages.take(1)
    pages.evict([2])
    pages.reuse([1])
    assert pages.take(1) == [2]
    pages.check()


def test_nothing_is_taken_beyond_the_promise() -> None:
    pages = allocator(8, promised=2)
    pages.take(2)
    with pytest.raises(PoolError, match="1 items asked for, but 2 of 2 promised"):
        pages.take(1)
    assert pages.occupancy().held == 2


def test_promises_never_exceed_the_total() -> None:
    pages = allocator(8, promised=6)
    assert pages.can_promise(2)
    assert not pages.can_promise(3)
    with pytest.raises(PoolError, match="can't promise 3 items, 6 of 8 are promised"):
        pages.promise(3)


def test_a_promise_in_use_cannot_be_withdrawn() -> None:
    pages = allocator(8, promised=4)
    held = pages.take(3)
    pages.withdraw(1)
    with pytest.raises(PoolError, match="can't withdraw a promise of 1 items"):
        pages.withdraw(1)
    pages.free(held)
    pages.withdraw(3)
    assert pages.promised == 0


@pytest.mark.parametrize("count", [-1])
def test_negative_promises_are_refused(count: int) -> None:
    pages = allocator(8, promised=4)
    with pytest.raises(PoolError):
        pages.promise(count)
    with pytest.raises(PoolError):
        pages.withdraw(count)


def test_check_sees_a_state_that_was_changed_behind_its_back() -> None:
    pages = allocator()
    pages.take(2)
    pages._states[2] = ItemState.FREE
    with pytest.raises(PoolError, match="counted"):
        pages.check()


def test_check_sees_a_page_missing_from_the_free_list() -> None:
    pages = allocator()
    pages._free.take(1)
    with pytest.raises(PoolError, match="free list"):
        pages.check()
