"""Window pages: what is still read stays mapped, what isn't is freed, and a dead range maps to 0."""

from __future__ import annotations

import pytest

from sluice.config import PoolMode
from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.layout.span import live_ordinals
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory
from sluice.pools.window import pages_touched
from sluice.types import RequestId
from tests.unit.pools.dsv4_needs import PAGE_TOKENS, VERIFY_TOKENS, WINDOW, memory, physical

LENGTHS = (
    *range(1, 10),
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    *range(127, 131),
    *range(143, 147),
    *range(255, 258),
    271,
    272,
    273,
    513,
)


def window_pages(tables: RequestTables) -> list[int]:
    return list(tables.page_table(Space.WINDOW_PAGE))


def mapped(tables: RequestTables) -> list[int]:
    """Which page indices have window pages."""
    return [index for index, page in enumerate(window_pages(tables)) if page]


def assert_all_live_mapped(state: Memory, tables: RequestTables, length: int) -> None:
    for component in state.components():
        rows = physical(component, tables, live_ordinals(component, length))  # raises if unmapped
        assert len(set(rows)) == len(rows)


def opened(state: Memory, max_tokens: int = 900) -> RequestTables:
    return state.open(RequestId("r"), max_tokens)


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_allocates_only_the_tail(length: int) -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, length, live_from=max(0, length - WINDOW))
    first = max(0, length - WINDOW) // PAGE_TOKENS
    assert mapped(tables) == list(range(first, -(-length // PAGE_TOKENS)))
    assert len(tables.pages) == -(-length // PAGE_TOKENS)
    assert_all_live_mapped(state, tables, length)
    state.advance(tables, length)
    assert_all_live_mapped(state, tables, length)


@pytest.mark.parametrize("window", [1, 2, 4, 16, 128])
def test_eviction_never_unmaps_a_row_that_is_still_read(window: int) -> None:
    state = memory(PoolMode.PAGED, window=window)
    tables = opened(state, 600)
    for length in range(1, 600):
        state.extend(tables, length)
        state.advance(tables, length)
        assert_all_live_mapped(state, tables, length)
        keep = min(
            live_ordinals(component, length).start
            for component in state.components()
            if component.space is Space.WINDOW_PAGE
        )
        assert mapped(tables)[0] == keep // PAGE_TOKENS, "a page behind the window is kept"
    state.check()


def test_a_small_window_keeps_the_overlap_tails_previous_block() -> None:
    """With W = 2 the tail reaches back further than the window: 130 tokens still read row 124."""
    state = memory(PoolMode.PAGED, window=2)
    tables = opened(state)
    state.extend(tables, 130, live_from=128)
    assert mapped(tables) == [0, 1]
    state.advance(tables, 130)
    assert mapped(tables) == [0, 1]
    state.extend(tables, 132)
    state.advance(tables, 132)
    assert mapped(tables) == [1]


@pytest.mark.parametrize("chunk", [1, 3, 7, 64, 128, 200, 512])
def test_every_rollback_of_a_forward_stays_readable(chunk: int) -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    start = 0
    while start < 800:
        stop = start + chunk
        state.extend(tables, min(stop, 800))
        for committed in range(max(start + 1, min(stop, 800) - VERIFY_TOKENS + 1), min(stop, 800)):
            assert_all_live_mapped(state, tables, committed)
        state.advance(tables, min(stop, 800))
        start = stop
        state.check()


def test_rows_read_by_the_next_chunk_survive_its_extend() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 130)
    before = window_pages(tables)
    state.extend(tables, 640)
    assert window_pages(tables)[: len(before)] == before
    assert_all_live_mapped(state, tables, 130)
    state.advance(tables, 640)
    assert mapped(tables) == [4]


def test_a_long_chunks_inner_pages_are_never_mapped() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 640)
    assert mapped(tables) == [4]
    assert state.occupancy()[1].held == 1


def test_drafted_rows_behind_the_commit_stay_mapped() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 127)
    state.advance(tables, 127)
    state.extend(tables, 131)  # verify 127..130
    state.advance(tables, 128)  # three drafts rejected
    assert mapped(tables) == [0, 1]
    state.extend(tables, 132)
    assert mapped(tables) == [0, 1]


def test_dead_pages_map_to_zero_and_are_not_mapped_again() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 200)
    state.advance(tables, 200)
    assert window_pages(tables)[0] == 0
    state.extend(tables, 204, live_from=0)
    assert window_pages(tables)[0] == 0


def test_close_leaves_no_mapping_for_the_next_owner_of_the_page() -> None:
    state = memory(PoolMode.PAGED)
    first = opened(state)
    state.extend(first, 100)
    state.extend(first, 300)
    assert mapped(first) == [0, 2]
    pages = list(first.pages)
    state.close(first)
    second = opened(state)
    state.extend(second, 300, live_from=284)
    assert list(second.pages) == pages
    assert mapped(second) == [2]


def test_freed_window_pages_serve_other_requests() -> None:
    state = memory(PoolMode.PAGED, num_window_pages=8)
    one, two = opened(state), opened(state)
    for stop in range(100, 900, 100):
        for tables in (one, two):
            state.extend(tables, stop)
            state.advance(tables, stop)
            state.check()
    assert not set(mapped_pages(one)) & set(mapped_pages(two))


def mapped_pages(tables: RequestTables) -> list[int]:
    return [page for page in window_pages(tables) if page]


def test_extending_over_several_chunks_at_once_is_caught() -> None:
    """Regression guard: the forwards in between would have read the padding page."""
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 640)  # a whole prompt, though it is to run in chunks of 128
    with pytest.raises(PoolError, match=r"128 tokens are committed, but page 0 of their window"):
        state.advance(tables, 128)


def test_committing_what_was_never_extended_is_caught() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 100)
    with pytest.raises(PoolError, match="was never mapped"):
        state.advance(tables, 129)


def test_forgetting_to_advance_hits_the_promise() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    for stop in (128, 256, 384, 512):
        state.extend(tables, stop)
    with pytest.raises(PoolError, match="advance after every commit"):
        state.extend(tables, 640)


def test_the_promise_is_reached_but_never_exceeded() -> None:
    """W = 16, T = 4: 16 and 19 tokens can each straddle a page border, so 4 pages at most."""
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 130)
    state.extend(tables, 386)
    assert mapped(tables) == [0, 1, 2, 3]
    state.close(tables)
    assert not memory(PoolMode.PAGED, num_window_pages=3).could_ever_open(900)
    assert memory(PoolMode.PAGED, num_window_pages=4).could_ever_open(900)
    assert memory(PoolMode.PAGED, num_window_pages=1).could_ever_open(100)


def test_a_promise_counts_drafted_rows_only_where_they_are_kept() -> None:
    """W = P = 128, T = 4: 128 old tokens lie in 2 pages, the 131 behind a long chunk in 3."""
    for num_window_pages, fits in ((4, False), (5, True)):
        state = memory(PoolMode.PAGED, window=128, num_window_pages=num_window_pages)
        assert state.could_ever_open(900) is fits


def test_pages_touched_is_the_worst_alignment() -> None:
    def brute(num_tokens: int, page_tokens: int) -> int:
        return max(
            len({position // page_tokens for position in range(start, start + num_tokens)})
            for start in range(page_tokens)
        )

    for num_tokens in range(0, 40):
        for page_tokens in (1, 2, 8):
            assert pages_touched(num_tokens, page_tokens) == brute(num_tokens, page_tokens)


def test_window_and_draft_share_one_mapping() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 140)
    target, draft = state.component("target.swa"), state.component("draft.swa")
    ordinals = live_ordinals(target, 140)
    assert physical(target, tables, ordinals) == physical(draft, tables, ordinals)
