"""Release with pages of several ranks: by the allocator's page, once, as a set; anything else raises."""

from __future__ import annotations

import pytest

from sluice.config import PoolConfig
from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.pools.allocator import PageAllocator
from sluice.pools.ledger import Ledger
from sluice.pools.memory import Memory, build_memory
from sluice.pools.paged import pages_for
from sluice.types import RequestId
from tests.unit.pools.test_solver import NEEDS

RANKS, KERNEL_PAGE, VERIFY = 4, 4, 4
PAGE = RANKS * KERNEL_PAGE  # the allocator's
CONFIG = PoolConfig(page_tokens=KERNEL_PAGE, num_pages=8, num_slots=3, context=RANKS)
# Tokens that count, and tokens there is room for: a verify step leaves drafted ones behind.
REQUESTS = [
    (owned, allocated) for owned in range(1, 3 * PAGE) for allocated in (owned, owned + VERIFY)
]


def _two_parts(
    pages: list[int], owned: int, allocated: int, page_tokens: int
) -> tuple[list[int], list[int]]:
    """A release in two parts, as others do it: the pages of owned tokens, the last one whole, and those of the
    surplus from the next page of ``page_tokens`` on.
    """
    surplus = range(pages_for(owned, page_tokens) * page_tokens, allocated)
    return pages[: pages_for(owned, PAGE)], sorted({pages[token // PAGE] for token in surplus})


def _opened(allocated: int) -> tuple[Ledger, list[int]]:
    ledger = Ledger(PageAllocator(Space.PAGE, CONFIG.num_pages))
    count = pages_for(allocated, PAGE)
    ledger.open(1, count)
    return ledger, ledger.take(1, count)


def test_schedule_page_used_for_release() -> None:
    """By the allocator's page the two parts are the request's pages, each once. By the kernel's, which is what
    the scheduler counts in, the page that holds the last owned token is in both: two requests would share it.
    """
    caught = 0
    for owned, allocated in REQUESTS:
        ledger, pages = _opened(allocated)
        own, surplus = _two_parts(pages, owned, allocated, PAGE)
        assert sorted(own + surplus) == sorted(pages)
        own, surplus = _two_parts(pages, owned, allocated, KERNEL_PAGE)
        ledger.free(1, own)
        if set(own) & set(surplus):
            caught += 1
            with pytest.raises(PoolError):
                ledger.free(1, surplus)
        ledger.allocator.check()
    assert caught > len(REQUESTS) // 4


@pytest.fixture
def memory() -> Memory:
    return build_memory(NEEDS, CONFIG, VERIFY)


@pytest.mark.parametrize(("owned", "allocated"), [(5, 7), (15, 19), (16, 20), (17, 21), (31, 35)])
@pytest.mark.parametrize("stuck", [False, True], ids=["released", "quarantined"])
def test_surplus_goes_back_with_the_request(
    memory: Memory, owned: int, allocated: int, stuck: bool
) -> None:
    tables = memory.open(RequestId("a"), owned)
    memory.extend(tables, allocated)
    memory.advance(tables, owned)
    assert len(tables.pages) == pages_for(allocated, PAGE)
    other = memory.open(RequestId("b"), PAGE)
    memory.extend(other, PAGE)
    held = list(other.pages)
    if stuck:
        memory.quarantine(tables)
    memory.close(tables)
    memory.check()
    assert other.pages == held
    for again in (memory.close, memory.quarantine):
        with pytest.raises(PoolError, match="is not open"):
            again(tables)
    memory.close(other)
    memory.check()
    assert memory.at_baseline()


def test_a_page_twice_in_one_release_frees_nothing() -> None:
    ledger, pages = _opened(2 * PAGE)
    with pytest.raises(PoolError, match="named twice"):
        ledger.free(1, [pages[0], pages[0]])
    assert ledger.items(1) == frozenset(pages)
    ledger.close(1)
    with pytest.raises(PoolError):
        ledger.close(1)
    with pytest.raises(PoolError, match="is free and can't be freed"):
        ledger.allocator.free(pages)
    ledger.check()
