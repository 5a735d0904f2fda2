"""Each request stays within its own promise and frees only what it holds."""

from __future__ import annotations

import pytest

from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.pools.allocator import PageAllocator
from sluice.pools.ledger import Ledger


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger(PageAllocator(Space.WINDOW_PAGE, 6))
    made.open(1, 3)
    made.open(2, 3)
    return made


def test_a_slot_cannot_take_from_anothers_promise(ledger: Ledger) -> None:
    ledger.take(1, 3)
    with pytest.raises(PoolError, match="slot 1 holds 3 of 3 promised items and asks for 1 more"):
        ledger.take(1, 1)
    assert ledger.take(2, 3) == [4, 5, 6]


def test_a_slot_cannot_free_what_another_holds(ledger: Ledger) -> None:
    ledger.take(1, 1)
    theirs = ledger.take(2, 1)
    with pytest.raises(PoolError, match=r"WINDOW_PAGE item 2 isn't held by slot 1"):
        ledger.free(1, theirs)


def test_freeing_keeps_the_promise(ledger: Ledger) -> None:
    ledger.free(1, ledger.take(1, 3))
    assert not ledger.allocator.can_promise(1)
    assert ledger.take(1, 3) == [1, 2, 3]


def test_quarantine_returns_what_was_never_taken(ledger: Ledger) -> None:
    ledger.take(1, 1)
    ledger.quarantine(1)
    assert ledger.allocator.promised == 4
    assert ledger.allocator.occupancy().quarantined == 1
    ledger.check()
    ledger.close(1)
    assert ledger.allocator.promised == 3
    assert ledger.allocator.occupancy().quarantined == 0
    ledger.check()


def test_a_quarantined_slot_can_only_be_closed(ledger: Ledger) -> None:
    ledger.take(1, 1)
    ledger.quarantine(1)
    with pytest.raises(PoolError, match="slot 1 is quarantined"):
        ledger.take(1, 0)
    with pytest.raises(PoolError, match="slot 1 is quarantined"):
        ledger.free(1, [])
    with pytest.raises(PoolError, match="slot 1 is quarantined"):
        ledger.quarantine(1)


def test_opening_twice_and_closing_the_unknown_are_refused(ledger: Ledger) -> None:
    with pytest.raises(PoolError, match="slot 1 is open already"):
        ledger.open(1, 0)
    ledger.close(1)
    with pytest.raises(PoolError, match="slot 1 is not open"):
        ledger.close(1)


def test_check_sees_an_item_with_two_owners(ledger: Ledger) -> None:
    (item,) = ledger.take(1, 1)
    ledger._accounts[2].items.add(item)
    with pytest.raises(PoolError, match="one owner"):
        ledger.check()


def test_check_sees_an_item_without_owner(ledger: Ledger) -> None:
    ledger.take(1, 2)
    ledger._accounts[1].items.pop()
    with pytest.raises(PoolError, match="2 items in use and 1 owned"):
        ledger.check()


def test_check_listed_compares_a_requests_table(ledger: Ledger) -> None:
    items = ledger.take(1, 2)
    ledger.check_listed(1, items)
    for wrong in ([items[0]], [*items, 6], [items[0], items[0]]):
        with pytest.raises(PoolError, match="slot 1 lists items"):
            ledger.check_listed(1, wrong)


# ---- items kept beyond their account


def _kept(total: int = 6) -> Ledger:
    """Items 1 and 2 were slot 1's and are cached; nobody holds anything."""
    made = Ledger(PageAllocator(Space.PAGE, total))
    made.open(1, 4)
    made.take(1, 3)
    made.share(1, [1, 2])
    made.close(1)
    made.check()
    return made


def test_kept_items_are_cached_when_the_last_holder_ends() -> None:
    kept = _kept()
    assert kept.allocator.occupancy().cached == 2
    assert kept.allocator.promised == 0
    kept.open(1, 3, [1, 2])
    kept.open(2, 3, [1, 2])
    kept.check()
    assert kept.allocator.promised == 1 + 1 + 2, "held twice, promised once"
    kept.close(1)
    assert (kept.holders(1), kept.allocator.occupancy().held) == (1, 2)
    kept.close(2)
    kept.check()
    assert kept.allocator.occupancy().cached == 2


def test_whoever_fits_without_kept_items_fits_with_them() -> None:
    kept = _kept()
    kept.open(1, 3)
    assert kept.can_open(3)
    assert kept.can_open(3, [1, 2])
    assert not kept.can_open(4, [1, 2]), "cached items become somebody's, and count"
    kept.open(2, 3, [1, 2])
    assert not kept.can_open(1)
    assert kept.can_open(2, [1, 2]), "those are there already"


def test_taking_evicts_cached_items_and_only_as_many_as_it_must() -> None:
    kept, asked = _kept(), []

    def evict_some(count: int) -> None:
        asked.append(count)
        for item in (2, 1)[:count]:
            kept.evict(item)

    kept.evict_with(evict_some)
    kept.open(1, 6)
    kept.take(1, 4)
    assert asked == []
    kept.take(1, 1)
    assert asked == [1]
    assert kept.holders(1) == 0
    kept.check()


def test_an_item_that_somebody_holds_is_not_evicted() -> None:
    kept = _kept()
    kept.open(1, 2, [1])
    with pytest.raises(PoolError, match="item 1 can't be evicted: 1 requests hold it"):
        kept.evict(1)
    kept.evict(2)
    with pytest.raises(PoolError, match="item 2 isn't kept"):
        kept.open(2, 2, [2])
    kept.check()


def test_only_ones_own_items_can_be_shared_or_freed() -> None:
    kept = _kept()
    kept.open(1, 4, [1])
    (own,) = kept.take(1, 1)
    for wrong in ([1], [own, 9]):
        with pytest.raises(PoolError, match="isn't held by slot 1 and can't be shared by it"):
            kept.share(1, wrong)
    with pytest.raises(PoolError, match="isn't held by slot 1 and can't be freed by it"):
        kept.free(1, [1])
    kept.check()


def test_quarantine_leaves_shared_items_alone() -> None:
    kept = _kept()
    kept.open(1, 4, [1, 2])
    kept.take(1, 1)
    kept.quarantine(1)
    occupancy = kept.allocator.occupancy()
    assert (occupancy.held, occupancy.quarantined, kept.allocator.promised) == (2, 1, 3)
    kept.check()
    kept.close(1)
    kept.check()
    assert kept.allocator.promised == 0


def test_check_sees_a_kept_item_counted_wrong() -> None:
    kept = _kept()
    kept._holders[1] = 1
    with pytest.raises(PoolError, match="kept item 1 is cached, booked for 1 requests"):
        kept.check()
