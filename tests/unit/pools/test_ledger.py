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
